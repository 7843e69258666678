// Everything that happens to a step's heads before attention: norm, rotation, and keys and values into their pages.
//
// One warp a head: first the HEADS query heads of a token (none if keys are stored as they come), then its keys, then
// its values; see head_rows.cuh.
#include "head_rows.cuh"

constexpr int WARPS = 4;
#if MODE == 4
#include "head_int4.cuh"
#endif

// `centre` (of keys, or none) is taken off what is quantised; scales below zero are those of the vectors themselves.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)
    kv_write(void* q, i64 q_stride, int heads, void* k, i64 k_stride, const void* v, i64 v_stride,
             int kv_heads, const float* __restrict__ q_norm, const float* __restrict__ k_norm, float eps,
             const float* __restrict__ cos_sin, int rotary, int rotates, const int* __restrict__ positions,
             const i64* __restrict__ slots, u8* k_rows, u8* v_rows, u8* k_params, u8* v_params, i64 page_bytes,
             const float* __restrict__ centre, float k_scale, float v_scale, const float* __restrict__ aim,
             const float* __restrict__ weight_along) {
  __shared__ float shared[WARPS][LARGEST];
  const int lane = lane_id(), token = blockIdx.y;
  const int index = blockIdx.x * WARPS + threadIdx.x / 32;
  wait_for_earlier();
  let_next_start();
  if (index >= heads + 2 * kv_heads) return;
  const bool is_query = index < heads, is_value = index >= heads + kv_heads;
  const int head = is_query ? index : (index - heads) % kv_heads;
  const int width = is_value ? DV : DK;
  const void* source = is_query ? q : is_value ? v : k;
  const i64 at = token * (is_query ? q_stride : is_value ? v_stride : k_stride) + (i64)head * width;
  const float* turn = positions ? cos_sin + (i64)positions[token] * rotary : cos_sin;
  float* own = shared[threadIdx.x / 32];
  float x[HELD];
  read_head(x, source, at, width);
  if (!is_value) {
    const float* weight = is_query ? q_norm : k_norm;
    norm_and_turn(x, width, weight, eps, rotates, turn, rotary, own);
    if (weight || rotates) {
      void* target = is_query ? q : k;
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (lane + 32 * j < width) write_at(target, at + lane + 32 * j, x[j]);
    }
    if (is_query) return;
    if (centre && MODE != 4) take_off(x, centre + head * DK, turn, rotary);
  }
  const i64 slot = slots[token];
  if (slot < 0) return;
  const i64 page = slot / BLOCK * page_bytes;
  const int place = head * BLOCK + (int)(slot % BLOCK);
  u8* row = (is_value ? v_rows : k_rows) + page + (i64)place * (is_value ? row_bytes(DV) : row_bytes(DK));
  u8* params = (is_value ? v_params : k_params) + page + place * (is_value ? param_bytes(DV) : param_bytes(DK));
#if MODE == 4
  __shared__ Int4Room rooms[WARPS];
  Int4Room& room = rooms[threadIdx.x / 32];
  if (is_value) {
    store_int4<DV>(room, x, row, params, false, nullptr, nullptr, 0.0f, nullptr, 0);
  } else {
    const bool aims = aim && weight_along;
    store_int4<DK>(room, x, row, params, true, centre ? centre + head * DK : nullptr, aims ? aim + head * DK : nullptr,
                   aims ? weight_along[head] : 0.0f, turn, rotary);
  }
#else
  store_vector(x, width, row, params, is_value ? v_scale : k_scale);
#endif
}
EXPORT(kv_write)
