"""The ABI check must pass a backend that keeps the rules and name the rule that a wrong one breaks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_checkpoint
from safetensors.torch import load_file
from toy_backend import ToyBackend

from deepseek_tgi.adapters.abi_check import CASES, LOAD_MIXES, CheckResult, Status, format_table, run_checks
from deepseek_tgi.adapters.abi_checkpoint import write_tiny_checkpoint
from deepseek_tgi.adapters.base import LoadOptions, ModelInfo
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kv.layout import KVLayout
from deepseek_tgi.kv.pool import KVPool


class Softmaxed(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, attention_mask).softmax(-1)


class LogSoftmaxed(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, attention_mask).log_softmax(-1)


class ShiftedByMaximum(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids, attention_mask)
        return logits - logits.amax(-1, keepdim=True)


class ShiftedByMean(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids, attention_mask)
        return logits - logits.mean(-1, keepdim=True)


class PenalisesRepeats(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids, attention_mask)
        logits[..., 300] -= 1.0  # as if token 300 had been seen
        return logits


class IgnoresMask(ToyBackend):
    def lengths(self, mask: torch.Tensor) -> list[list[int]]:
        return [list(range(mask.shape[1])) for _ in mask]


class CountsColumns(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        out = torch.zeros(*input_ids.shape, self.vocab)
        for row, columns in enumerate(self.lengths(mask)):
            # Rotation is relative, so a plain offset would not show in the logits: the steps grow here.
            out[row, columns] = self.alone(input_ids[row, columns], torch.tensor(columns) ** 2)
        return out


class FillsPadding(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(input_ids, attention_mask)
        return torch.where(logits == 0, torch.full_like(logits, -1e9), logits)


class HalfPrecision(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, attention_mask).half()


class TokenizersVocabulary(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, attention_mask)[..., : self.texts.vocab_size]


class LastRowOnly(ToyBackend):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids, attention_mask)[:, -1]


class WritesNextSlot(ToyBackend):
    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(pool, layer, slots[-1:] + 1, torch.zeros_like(k[-1:]), torch.zeros_like(v[-1:]))
        super().store(pool, layer, slots, k, v)


class WritesWholeBlocks(ToyBackend):
    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pool.view(layer).v[slots // self.block_size, :, -1] = 0.0
        super().store(pool, layer, slots, k, v)


class WritesBlockZero(ToyBackend):
    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(pool, layer, torch.zeros_like(slots[:1]), k[:1], v[:1])
        super().store(pool, layer, slots, k, v)


class LooksAtNeighbours(ToyBackend):
    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        spread = self.table[inputs.input_ids].std() if len(inputs.cache_lens) > 1 else torch.tensor(0.0)
        return super().step(inputs, pool) * (1 + spread * 0.01)


class SeesTheFuture(ToyBackend):
    def alone(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().alone(ids, positions) + self.table[ids].mean() * torch.arange(self.vocab)


class Drifts(ToyBackend):
    calls = 0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        return super().forward(input_ids, attention_mask) * (1 + 1e-6 * self.calls)


class AssumesBlocksInARow(ToyBackend):
    def context_slots(self, inputs: ForwardInputs, request: int, length: int) -> torch.Tensor:
        return inputs.block_tables[request, 0].long() * self.block_size + torch.arange(length)


class RestartsPositions(ToyBackend):
    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        return super().step(replace(inputs, positions=inputs.positions % 16 // 2), pool)


class GivesEveryRow(ToyBackend):
    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        return self.hidden(inputs, pool) @ self.head.T


class KeepsACacheOfForward(ToyBackend):
    offset = 0.0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        self.offset += 1e-5
        return super().forward(input_ids, attention_mask)

    def step(self, inputs: ForwardInputs, pool: KVPool) -> torch.Tensor:
        return super().step(inputs, pool) + self.offset


class ConstantEos(ToyBackend):
    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({2})


class NeedsPadToken(ToyBackend):
    @property
    def pad_token_id(self) -> int:
        raise ValueError("the tokenizer has no pad token")


class PadsOutsideTheVocabulary(ToyBackend):
    @property
    def pad_token_id(self) -> int:
        return self.vocab


class OtherBlockSize(ToyBackend):
    @property
    def kv_layout(self) -> KVLayout:
        return replace(super().kv_layout, block_size=32)


class SilentlyOtherCache(ToyBackend):
    @classmethod
    def get_model(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> ToyBackend:
        return super().get_model(model_id, revision, replace(options or LoadOptions(), kv_cache_dtype="float32"))


class SkipsALayer(ToyBackend):
    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if layer == 0:
            super().store(pool, layer, slots, k, v)


class WritesStoredTokens(ToyBackend):
    def store(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().store(pool, layer, slots % pool.num_slots, k, v)


class NoWorkspace(ToyBackend):
    def workspace_bytes(self, num_tokens: int, num_logit_rows: int) -> int:
        return 0


class BlankInfo(ToyBackend):
    @property
    def info(self) -> ModelInfo:
        return replace(super().info, quantization="")


class LoadsAnything(ToyBackend):
    @classmethod
    def get_model(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> ToyBackend:
        if not Path(model_id, "config.json").is_file():
            return ToyBackend.__new__(ToyBackend)
        return super().get_model(model_id, revision, options)


class CrashesOnLoad(ToyBackend):
    @classmethod
    def get_model(cls, model_id: str, revision: str | None = None, options: LoadOptions | None = None) -> ToyBackend:
        raise KeyError("model.layers.0")


WRONG: list[tuple[type[ToyBackend], str, str]] = [
    (Softmaxed, "logits-raw", "softmax was applied"),
    (LogSoftmaxed, "logits-raw", "log-softmax was applied"),
    (ShiftedByMaximum, "logits-raw", "shifted by their maximum"),
    (ShiftedByMean, "logits-raw", "shifted by their mean"),
    (PenalisesRepeats, "logits-linear", "logits were processed"),
    (IgnoresMask, "padding-left", "the padded row against the row alone"),
    (CountsColumns, "padding-left", "the padded row against the row alone"),
    (FillsPadding, "padding-right", "padded places hold logits"),
    (HalfPrecision, "logits-shape", "float16"),
    (TokenizersVocabulary, "logits-shape", "expected float32 [2, 11, 320]"),
    (LastRowOnly, "logits-shape", "expected float32 [2, 11, 320]"),
    (WritesNextSlot, "writes-only-its-slots", "bytes changed outside the slots"),
    (WritesWholeBlocks, "writes-only-its-slots", "bytes changed outside the slots"),
    (WritesBlockZero, "writes-only-its-slots", "block 0 was written"),
    (WritesStoredTokens, "writes-only-its-slots", "for a token whose slot is -1"),
    (LooksAtNeighbours, "rows-independent", "requests together against each alone"),
    (SeesTheFuture, "causal", "the first half against the half alone"),
    (Drifts, "repeatable", "two equal calls differ"),
    (AssumesBlocksInARow, "blocks-in-any-order", "against"),
    (RestartsPositions, "step-agrees-with-forward", "prefill and decode against forward"),
    (GivesEveryRow, "logit-rows", "expected float32 [3, 320]"),
    (KeepsACacheOfForward, "forward-leaves-no-trace", "other logits after a forward"),
    (ConstantEos, "eos-from-checkpoint", "[257, 258]"),
    (NeedsPadToken, "batch-without-pad-token", "ValueError: the tokenizer has no pad token"),
    (PadsOutsideTheVocabulary, "batch-without-pad-token", "pad_token_id is 320"),
    (OtherBlockSize, "kv-layout", "block_size 16 was asked for"),
    (SilentlyOtherCache, "load-float32-kv-int8", "asked for"),
    (SkipsALayer, "kv-layout", "nothing stored in layers [1]"),
    (NoWorkspace, "workspace-bounded", "workspace_bytes"),
    (BlankInfo, "info-complete", "quantization"),
    (LoadsAnything, "load-refuses-empty-folder", "an empty folder was loaded"),
    (CrashesOnLoad, "load", "KeyError"),
]


def check(backend: type[ToyBackend]) -> dict[str, CheckResult]:
    return {result.case: result for result in run_checks(backend)}


def test_backend_that_keeps_the_rules_passes_every_case() -> None:
    results = check(ToyBackend)
    assert {name: r.detail for name, r in results.items() if not r.passed} == {}
    assert results.keys() >= CASES.keys()
    assert len(results) == len(CASES) + len(LOAD_MIXES) + 2


def test_declined_option_is_reported_and_is_no_breach() -> None:
    result = check(ToyBackend)["load-float32-kv-int8"]
    assert (result.status, result.passed) == (Status.REFUSED, True)
    assert "toy: dtype float32 with cache int8" in result.detail


@pytest.mark.parametrize(("backend", "case", "reason"), WRONG, ids=[wrong[0].__name__ for wrong in WRONG])
def test_breach_is_named(backend: type[ToyBackend], case: str, reason: str) -> None:
    result = check(backend)[case]
    assert result.status is Status.FAILED
    assert reason in result.detail


def test_every_case_catches_some_backend() -> None:
    """A case that no wrong backend trips has never been seen to fail."""
    caught = {case for _, case, _ in WRONG}
    own_evidence = {"mask-none", "chunks-agree"}  # their breaches show first in padding-right and step-agrees
    assert CASES.keys() - caught == own_evidence


def test_results_arrive_as_they_are_made() -> None:
    seen: list[str] = []
    results = run_checks(ToyBackend, on_result=lambda result: seen.append(result.case))
    assert seen == [result.case for result in results]


def test_given_model_is_used(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [3, 4]}))
    results = {r.case: r for r in run_checks(ToyBackend, str(folder))}
    assert results["eos-from-checkpoint"].detail == "[3, 4] of generation_config.json"


def test_missing_model_is_a_failed_load() -> None:
    results = run_checks(ToyBackend, "/nonexistent")
    assert [(r.case, r.passed) for r in results] == [("load-refuses-empty-folder", True), ("load", False)]


def test_table_lines_up_and_names_what_broke() -> None:
    results = [
        CheckResult("short", Status.PASSED, "fine", 0.5),
        CheckResult("a-longer-name", Status.FAILED, "because", 1.25),
        CheckResult("option", Status.REFUSED, "not here", 0.0),
    ]
    assert format_table(results).splitlines() == [
        "short          ok         0.50 s  fine",
        "a-longer-name  FAILED     1.25 s  because",
        "option         refused    0.00 s  not here",
        "2 of 3 cases hold; broken: a-longer-name",
    ]


def test_table_of_a_sound_backend_ends_with_the_count() -> None:
    assert format_table([CheckResult("one", Status.PASSED, "", 0.0)]).splitlines()[-1] == "1 of 1 cases hold"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_built_checkpoint_stores_mixed_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors: dict[str, Any] = load_file(write_tiny_checkpoint(tmp_path / "m", dtype) / "model.safetensors")
    packed = "model.layers.0.mlp.down_proj"
    assert tensors[f"{packed}.qweight"].dtype == torch.int32
    assert tensors[f"{packed}.qweight"].shape == (256, 128 // 8)
    assert tensors[f"{packed}.scales"].dtype == torch.float16
    assert tensors["lm_head.weight"].dtype == dtype


def test_checkpoint_is_built_where_numpy_is_not_installed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from pathlib import Path; from deepseek_tgi.adapters.abi_checkpoint import write_tiny_checkpoint\n"
        "write_tiny_checkpoint(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "bare")]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    head = load_file(tmp_path / "bare" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head[300], -head[301])
    assert torch.equal(head[302], head[303] * 2)


def test_deepseek_quant_keeps_every_rule() -> None:
    results = run_checks(QuantizedModelAdapter)
    assert {r.case: r.detail for r in results if r.status is not Status.PASSED} == {}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_deepseek_quant_keeps_every_rule_over_latents_too(tmp_path: Path, family: str) -> None:
    tiny_checkpoint(tmp_path, family, "awq-gemm")
    results = run_checks(QuantizedModelAdapter, str(tmp_path))
    assert not [r for r in results if not r.passed], format_table(results)
    assert len(results) == 2 + len(CASES) + len(LOAD_MIXES)
