// The door to latent attention: see latent_absorbed.cpp and latent_expanded.cpp.

#include "latent_attention.h"

DSTGI_API void dstgi_latent_attention(const LatentPages* pages, const UpWeight* up, const LatentCall* call) {
  const dstgi::Step step{*pages, *up, *call};
  dstgi::run_absorbed(step);
  for (int64_t b = 0; b < call->requests; ++b)
    if (step.expanded(b)) dstgi::run_expanded(step, b);
}
