"""Runs the ABI cases against any backend: what `deepseek-tgi check-backend NAME` prints.

Knows the order of the cases and how to report; the rules themselves are in `abi_cases` and `abi_cache_cases`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from deepseek_tgi.adapters import abi_cache_cases, abi_cases
from deepseek_tgi.adapters.abi_checkpoint import write_tiny_checkpoint
from deepseek_tgi.adapters.abi_steps import Bench, CaseError, Piece, relative_error
from deepseek_tgi.adapters.base import LoadOptions, ModelAdapter
from deepseek_tgi.errors import CheckpointError, ConfigError

T = TypeVar("T")

CASES: dict[str, abi_cases.Case] = {
    "info-complete": abi_cases.info_is_complete,
    "eos-from-checkpoint": abi_cases.eos_from_checkpoint,
    "logits-shape": abi_cases.logits_shape,
    "logits-raw": abi_cases.logits_raw,
    "logits-linear": abi_cases.logits_linear,
    "mask-none": abi_cases.mask_none,
    "padding-right": abi_cases.padding_right,
    "padding-left": abi_cases.padding_left,
    "batch-without-pad-token": abi_cases.batch_without_pad_token,
    "causal": abi_cases.causal,
    "repeatable": abi_cases.repeatable,
    "kv-layout": abi_cases.layout_matches_pool,
    "step-agrees-with-forward": abi_cache_cases.step_agrees_with_forward,
    "chunks-agree": abi_cache_cases.chunks_agree,
    "blocks-in-any-order": abi_cache_cases.blocks_in_any_order,
    "logit-rows": abi_cache_cases.logit_rows_only,
    "rows-independent": abi_cache_cases.rows_are_independent,
    "writes-only-its-slots": abi_cache_cases.writes_only_its_slots,
    "forward-leaves-no-trace": abi_cache_cases.forward_leaves_no_trace,
    "workspace-bounded": abi_cache_cases.workspace_is_bounded,
}
"""Name to case, in the order they run. Names are part of the interface: scripts grep for them."""

LOAD_MIXES = (
    *(("float32", "float32"), ("float32", "int8"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")),
    *(("float16", "float16"), ("auto", "auto")),
)
"""`dtype` and `kv_cache_dtype` pairs that a backend must either load rightly or refuse with `ConfigError`."""

MIX_TOLERANCE = 0.2
"""Share of the largest logit by which a low-precision mix may differ from the exact one: rounding, not nonsense."""

MIX_ROWS = 0.8
"""Share of rows that must: a token whose experts are nearly as good as others may be sent to those by a rounding."""


class RefusedError(Exception):
    """The backend declined an option with `ConfigError`."""


class Status(Enum):
    """How a case ended; REFUSED is a combination that the backend declines with a clear error, which it may."""

    PASSED = "ok"
    FAILED = "FAILED"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of one case. `detail` says what was seen, or what rule was broken and how."""

    case: str
    status: Status
    detail: str
    seconds: float

    @property
    def passed(self) -> bool:
        """False only for a breach of the rules."""
        return self.status is not Status.FAILED


OnResult = Callable[[CheckResult], None]


def run_checks(
    adapter_cls: type[ModelAdapter], model_id: str | None = None, on_result: OnResult | None = None
) -> list[CheckResult]:
    """Run every case against `adapter_cls` on `model_id`, or on a tiny checkpoint made in a temporary folder.

    Never raises for what the backend does: a breach, a wrong exception or a crash is a failed result. `on_result` is
    called after each case.
    """
    with _model(model_id) as folder:
        results = []
        for result in _results(adapter_cls, str(folder), built=model_id is None):
            results.append(result)
            if on_result is not None:
                on_result(result)
        return results


def format_table(results: Sequence[CheckResult]) -> str:
    """The results as aligned lines and a closing count."""
    width = max((len(r.case) for r in results), default=0)
    lines = [f"{r.case:<{width}}  {r.status.value:<7}  {r.seconds:6.2f} s  {r.detail}" for r in results]
    failed = [r.case for r in results if not r.passed]
    closing = f"{len(results) - len(failed)} of {len(results)} cases hold"
    return "\n".join([*lines, f"{closing}; broken: {', '.join(failed)}" if failed else closing])


@contextmanager
def _model(model_id: str | None) -> Iterator[str | Path]:
    if model_id is not None:
        yield model_id
        return
    with tempfile.TemporaryDirectory(prefix="abi-check-") as folder:
        yield write_tiny_checkpoint(Path(folder, "model"))


def _results(adapter_cls: type[ModelAdapter], model_id: str, built: bool) -> Iterator[CheckResult]:
    yield _attempt("load-refuses-empty-folder", lambda: (_refuses_empty_folder(adapter_cls), None))[0]
    loading, bench = _attempt("load", lambda: _first_load(adapter_cls, model_id, built))
    yield loading
    if bench is None:
        return
    for name, case in CASES.items():
        yield _attempt(name, partial(_run_case, case, bench))[0]
    measured, exact = _attempt("prompt-for-mixes", lambda: ("", _prompt_logits(bench)))
    if exact is None:
        yield measured
        return
    for dtype, cache in LOAD_MIXES:
        yield _attempt(f"load-{dtype}-kv-{cache}", partial(_run_mix, bench, dtype, cache, exact))[0]
    bench.adapter.close()


def _attempt(name: str, run: Callable[[], tuple[str, T]]) -> tuple[CheckResult, T | None]:
    """Run one case and turn whatever happens into a result."""
    started = time.perf_counter()
    value: T | None = None
    try:
        detail, value = run()
        status = Status.PASSED
    except RefusedError as error:
        detail, status = str(error), Status.REFUSED
    except CaseError as error:
        detail, status = str(error), Status.FAILED
    except Exception as error:  # noqa: BLE001 - a stranger's backend may raise anything, and that is the finding
        detail, status = f"{type(error).__name__}: {error}", Status.FAILED
    return CheckResult(name, status, detail, time.perf_counter() - started), value


def _run_case(case: abi_cases.Case, bench: Bench) -> tuple[str, None]:
    return case(bench), None


def _refuses_empty_folder(adapter_cls: type[ModelAdapter]) -> str:
    with tempfile.TemporaryDirectory(prefix="abi-check-") as folder:
        try:
            adapter_cls.get_model(folder, None, LoadOptions())
        except (CheckpointError, ConfigError) as error:
            return type(error).__name__
    raise CaseError("an empty folder was loaded as a model, expected CheckpointError")


def _first_load(adapter_cls: type[ModelAdapter], model_id: str, built: bool) -> tuple[str, Bench]:
    """Exact arithmetic where the backend has it, so that comparisons are sharp; else what it chooses itself."""
    try:
        bench = _load(adapter_cls, model_id, LoadOptions(dtype="float32", kv_cache_dtype="float32"), built)
    except ConfigError:
        bench = _load(adapter_cls, model_id, LoadOptions(), built)
    return f"{bench.adapter.info.dtype}, cache {bench.adapter.kv_layout.mode.value}", bench


def _load(adapter_cls: type[ModelAdapter], model_id: str, options: LoadOptions, built: bool) -> Bench:
    adapter = adapter_cls.get_model(model_id, None, options)
    if not isinstance(adapter, ModelAdapter):
        raise CaseError(f"get_model gave a {type(adapter).__name__}, expected a ModelAdapter")
    return Bench(adapter, model_id, options, built, _prompts(adapter))


def _prompts(adapter: ModelAdapter) -> tuple[tuple[int, ...], ...]:
    """Three prompts of 19, 11 and 40 ids, clear of special ones; the last spans several blocks."""
    generator = torch.Generator().manual_seed(3)
    special = adapter.tokenizer.special_ids | adapter.eos_token_ids
    plain = [i for i in range(min(adapter.tokenizer.vocab_size, 4096)) if i not in special]
    picks = torch.randint(0, len(plain), (70,), generator=generator).tolist()
    ids = tuple(plain[i] for i in picks)
    return ids[:19], ids[19:30], ids[30:70]


def _prompt_logits(bench: Bench) -> torch.Tensor:
    """Logits of a prefill and one decode step through the cache."""
    prompt = bench.prompts[2]
    pool, blocks = bench.pool(), bench.blocks_for(len(prompt))
    first = bench.step(pool, [Piece(prompt[:-1], blocks)])
    return torch.cat([first, bench.step(pool, [Piece(prompt[-1:], blocks, len(prompt) - 1)])])


def _usual_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """As `relative_error`, the largest but for the worst rows."""
    if relative_error(got, want) == float("inf"):
        return float("inf")
    rows = (got - want).abs().amax(1) / want.abs().max().clamp(min=1e-9)
    return float(rows.sort().values[int(MIX_ROWS * (len(rows) - 1))])


def _run_mix(bench: Bench, dtype: str, cache: str, exact: torch.Tensor) -> tuple[str, None]:
    options = replace(bench.options, dtype=dtype, kv_cache_dtype=cache)
    try:
        mixed = _load(type(bench.adapter), bench.model_id, options, bench.built)
    except ConfigError as error:
        raise RefusedError(str(error)) from error
    got = mixed.adapter.kv_layout.mode.value
    if cache not in ("auto", got):
        raise CaseError(f"kv_cache_dtype {cache} was asked for, kv_layout has {got}")
    gap = _usual_error(_prompt_logits(mixed), exact)
    mixed.adapter.close()
    if not gap <= MIX_TOLERANCE:
        raise CaseError(f"logits differ by {gap:.2g} of the largest from {bench.adapter.info.dtype}")
    return f"{mixed.adapter.info.dtype}, cache {got}, within {gap:.1e}", None
