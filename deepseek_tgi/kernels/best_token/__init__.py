"""The likeliest token of each row: what choosing without any wishes comes to, in one pass over the logits.

`best_token(logits [n, V] f32, out=None) -> [3, n] f32`: the index of the largest logit (the first of equals; exact,
since V is at most 2^24), the logarithm of its softmax, and the logit itself. A row that holds NaN has NaN for its
logit. Rows may lie apart; a row's bits do not depend on the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from deepseek_tgi.kernels.common import describe, refuse

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_VOCAB", "BestToken", "TokenIds", "best_token_on", "check_best_token", "token_ids_on"]

MAX_VOCAB = 1 << 24


class BestToken(Protocol):
    """See the module's docstring."""

    def __call__(self, logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class TokenIds(Protocol):
    """Writes `values [n]`, whole numbers of a float type, to `out [n] int64`, those out of range as the nearest in it.

    Ids are 0 to `limit` - 1; what is no number becomes 0.
    """

    def __call__(self, values: torch.Tensor, out: torch.Tensor, limit: int) -> None: ...


def check_best_token(logits: torch.Tensor, out: torch.Tensor | None = None) -> None:
    """Raise `GenerationError` for logits or a result that do not fit."""
    import torch

    fits = logits.dim() == 2 and logits.dtype == torch.float32 and 1 <= logits.shape[1] <= MAX_VOCAB
    if not (fits and logits.stride(1) == 1):
        refuse(f"best_token: got {describe('logits', logits)}, expected [n, up to {MAX_VOCAB}] float32, rows dense")
    if out is not None and not (out.dtype == torch.float32 and out.is_contiguous() and out.shape == (3, len(logits))):
        refuse(f"best_token: got {describe('out', out)}, expected [3, {len(logits)}] float32, dense")


def best_token_on(device: torch.device) -> BestToken | None:
    """The op of a GPU; None where torch's operators do (on a CPU they are as fast) or no kernel can be had."""
    if device.type != "cuda":
        return None
    from deepseek_tgi.kernels.best_token.cuda import BestTokenOp
    from deepseek_tgi.kernels.compiler import BuildError
    from deepseek_tgi.kernels.cuda.machine import machine_of

    try:
        return BestTokenOp(machine_of(device).programs)
    except BuildError:
        return None


def token_ids_on(device: torch.device) -> TokenIds:
    """The op of a device: one launch on a GPU."""
    from deepseek_tgi.kernels.best_token.reference import token_ids

    if device.type == "cuda":
        from deepseek_tgi.kernels.best_token.cuda import TokenIdsOp
        from deepseek_tgi.kernels.compiler import BuildError
        from deepseek_tgi.kernels.cuda.machine import machine_of

        try:
            return TokenIdsOp(machine_of(device).programs)
        except BuildError:
            return token_ids
    return token_ids
