"""From the residual stream to the experts: the router's rows come by wide loads, and nothing is spilt."""

from __future__ import annotations

from compiled.kernels import HOPPER, WIDE_LOAD, CudaKernel

from deepseek_tgi.kernels.expert_choice.cuda import choice_spec
from deepseek_tgi.kernels.route import GroupRank, Routing, Scoring

LITE = Routing(64, 6, Scoring.SOFTMAX, GroupRank.NONE, 1, 1, False, 1.0)
"""DeepSeek-V2-Lite's."""

CUDA = [
    CudaKernel(choice_spec(LITE, 2048, tokens), 96, (WIDE_LOAD, r"UCGABAR_ARV"), (HOPPER,), ahead=9)
    for tokens in (1, 17)
]
