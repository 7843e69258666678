// What the kernels of experts on INT4 weights share: how pairs, experts and weights are numbered and lie.
//
// Pairs of a token and an expert are numbered token * SLOTS + slot: TOP routed slots, then SHARED slots that stand for the
// shared expert, cut into pieces as wide as a routed one. Experts are numbered 0 .. EXPERTS-1, then the SHARED pieces.
// Weights of all experts lie one after the other (see int4_weight.cuh): of gate and up INNER rows each, padded to whole
// units of 64; of down HIDDEN rows, likewise.
// Macros: GROUP, SCALE_KIND, EXPERTS, TOP, SHARED, HIDDEN, INNER (a multiple of 64 and GROUP), STAGE (inputs that are
// loaded together: a multiple of 64 and GROUP, of which both padded HIDDEN and INNER have whole ones).
#pragma once
#include "int4_weight.cuh"

constexpr int SLOTS = TOP + SHARED, ALL = EXPERTS + SHARED;
constexpr int STAGE_K = STAGE, STAGE_CHUNKS = STAGE_K / CHUNK, STAGE_GROUPS = STAGE_K / GROUP;
constexpr int META_AT = STAGE_CHUNKS * CHUNK_BYTES, META_BYTES = STAGE_GROUPS * GROUP_BYTES;
constexpr int TILE_BYTES = META_AT + META_BYTES;  // a tile's codes of a stage, and its groups' words
constexpr int HIDDEN_STAGES = (HIDDEN + STAGE_K - 1) / STAGE_K, INNER_STAGES = INNER / STAGE_K;
constexpr int GATE_TILES = INNER / TILE_ROWS, DOWN_TILES = (HIDDEN + 63) / 64 * 4;

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
