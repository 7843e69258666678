"""Operations on rows between the products: no read of theirs comes ahead of the wait for the kernel before."""

from __future__ import annotations

from compiled.kernels import CudaKernel

from deepseek_tgi.kernels.best_token.cuda import CHUNK
from deepseek_tgi.kernels.cuda.program import spec

CUDA = [
    CudaKernel(spec("rms_norm", "rms_norm", "plpfpli", THREADS=512, RUNS=1, X_BF16=0, OUT_BF16=1), 64),
    CudaKernel(spec("rms_norm", "rms_norm", "plpfpli", THREADS=128, RUNS=0, X_BF16=1, OUT_BF16=1), 64),
    CudaKernel(spec("silu_mul", "silu_mul", "ppi", BF16=1, EIGHT=1), 64),
    CudaKernel(spec("rope", "rope", "pliipliippi", BF16=1), 64),
    CudaKernel(spec("best_token", "best_in_chunk", "plip", CHUNK=CHUNK, THREADS=256), 64),
    CudaKernel(spec("best_token", "best_of_chunks", "piip", CHUNK=CHUNK, THREADS=256), 64),
    CudaKernel(spec("embedding", "embedding", "pppi", THREADS=128, KIND=0), 64),
]
