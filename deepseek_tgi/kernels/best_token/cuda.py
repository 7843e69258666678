"""The likeliest token in CUDA C++: chunks of a row side by side, joined in a fixed order; and ids for the next step."""

from __future__ import annotations

import torch

from deepseek_tgi.kernels.best_token import check_best_token
from deepseek_tgi.kernels.cuda.program import Programs, spec

CHUNK, THREADS = 2048, 256


class BestTokenOp:
    """The op over one device's programs."""

    def __init__(self, programs: Programs) -> None:
        sizes = {"CHUNK": CHUNK, "THREADS": THREADS}
        self._in_chunk = programs.kernel(spec("best_token", "best_in_chunk", "plip", **sizes))
        self._of_chunks = programs.kernel(spec("best_token", "best_of_chunks", "piip", **sizes))

    def __call__(self, logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See the contract."""
        check_best_token(logits, out)
        rows, width = logits.shape
        chunks = -(-width // CHUNK)
        parts = torch.empty(rows, chunks, 3, device=logits.device)
        out = torch.empty(3, rows, device=logits.device) if out is None else out
        if rows:
            arguments = (logits, logits.stride(0), width, parts)
            self._in_chunk((chunks, rows, 1), THREADS, arguments, overlap=True)
            self._of_chunks((rows, 1, 1), THREADS, (parts, chunks, rows, out), overlap=True)
        return out


class TokenIdsOp:
    """`op(values [n] f32 or f64, out [n] i64, limit)`: chosen ids as a step wants them, none of them out of range."""

    def __init__(self, programs: Programs) -> None:
        self._kernel = programs.kernel(spec("best_token", "token_ids", "pipii", CHUNK=CHUNK, THREADS=THREADS))

    def __call__(self, values: torch.Tensor, out: torch.Tensor, limit: int) -> None:
        """See the class."""
        count = out.shape[0]
        assert values.shape == out.shape, "an id a row"
        assert values.is_contiguous(), "one behind the other"
        assert out.is_contiguous(), "one behind the other"
        assert values.dtype in (torch.float32, torch.float64), "whole numbers of these types"
        grid = (-(-count // THREADS), 1, 1)
        self._kernel(grid, THREADS, (values, int(values.dtype == torch.float64), out, count, limit), overlap=True)
