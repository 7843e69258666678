"""The likeliest token in CUDA C++: chunks of a row side by side, joined in a fixed order."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.best_token import check_best_token
from deepseek_tgi.kernels.cuda.program import Programs, spec

CHUNK, THREADS = 4096, 256


class BestTokenOp:
    """The op over one device's programs."""

    def __init__(self, programs: Programs) -> None:
        sizes = {"CHUNK": CHUNK, "THREADS": THREADS}
        self._in_chunk = programs.kernel(spec("best_token", "best_in_chunk", "plip", **sizes))
        self._of_chunks = programs.kernel(spec("best_token", "best_of_chunks", "piip", **sizes))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        check_best_token(logits)
        rows, width = logits.shape
        chunks = -(-width // CHUNK)
        parts = torch.empty(rows, chunks, 3, device=logits.device)
        out = torch.empty(3, rows, device=logits.device)
        if rows:
            self._in_chunk((chunks, rows, 1), THREADS, (logits, logits.stride(0), width, parts))
            self._of_chunks((rows, 1, 1), THREADS, (parts, chunks, rows, out), overlap=True)
        return out
