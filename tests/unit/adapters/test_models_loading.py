"""Loading: number formats, tied heads, what is refused before weights are read, what is said, how much it takes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import tiny_checkpoint
from packed_checkpoint import packed_checkpoint
from safetensors.torch import load_file, save_file
from stepper import Stepper, relative_error

from deepseek_tgi.adapters import dtypes, quantized
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import CheckpointError, ConfigError, UnsupportedModelError

TEXT = [(11 * i + 5) % 270 for i in range(40)]


def load(path: Path, **options: Any) -> QuantizedModelAdapter:
    return QuantizedModelAdapter.get_model(str(path), options=LoadOptions(**options))


@torch.no_grad()
def reference_logits(checkpoint: Any) -> torch.Tensor:
    logits: torch.Tensor = checkpoint.reference()(torch.tensor([TEXT])).logits[0]
    return logits


@pytest.mark.parametrize("wish", ["auto", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dense", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_mix_of_stored_and_wanted_dtypes_starts_and_is_right(
    tmp_path: Path, dense: torch.dtype, scales: torch.dtype, wish: str
) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama", "awq-gemm", dtype=dense, scale_dtype=scales)
    adapter = load(tmp_path, dtype=wish)
    assert adapter.info.dtype in ("float32", "bfloat16")
    # float32: other summation order only. bfloat16 rounds products' inputs and the cache to 8 bits: 2^-9 each, a dozen
    # of them in two layers, and dense bfloat16 storage of float16 weights besides.
    bound = 1e-4 if adapter.info.dtype == "float32" else 4e-2
    assert relative_error(Stepper(adapter).run(TEXT, [30]), reference_logits(checkpoint)) <= bound


def test_the_dtype_in_use_is_the_one_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path, "llama", "awq-gemm")
    for has, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(dtypes, "cpu_multiplies_bfloat16", lambda has=has: has)
        adapter = load(tmp_path, dtype="auto")
        assert adapter.info.dtype == expected
        assert adapter.kv_layout.mode.value == expected, "the cache follows compute"


def test_the_cpus_own_word_on_bfloat16_is_taken(tmp_path: Path) -> None:
    listed, cut = tmp_path / "with", tmp_path / "without"
    listed.write_text("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n")
    cut.write_text("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16x\nbugs\t\t: avx512_bf16\n")
    assert dtypes.cpu_multiplies_bfloat16(listed)
    assert not dtypes.cpu_multiplies_bfloat16(cut)
    assert not dtypes.cpu_multiplies_bfloat16(tmp_path / "absent")
    assert dtypes.cpu_multiplies_bfloat16() == torch.cpu._is_avx512_bf16_supported()


def test_float16_on_a_cpu_falls_back_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_checkpoint(tmp_path, "llama", "awq-gemm")
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, dtype="float16").info.dtype == "float32"
    assert [r.message for r in caplog.records if "float16 is not computed" in r.message]


@pytest.mark.parametrize(("wish", "warned"), [(None, False), ("awq", False), ("gptq", True)])
def test_what_is_stored_decides_over_the_quantize_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wish: str | None, warned: bool
) -> None:
    tiny_checkpoint(tmp_path, "llama", "awq-gemm")
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, quantize=wish).info.quantization == "awq-gemm-g32"
    assert any("gptq" in r.message and "awq-gemm-g32" in r.message for r in caplog.records) == warned


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "float16", "int8", "fp8_e4m3fn", "int4"])
def test_each_cache_format_stays_within_its_own_error(tmp_path: Path, mode: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "llama", "awq-gemm")
    adapter = load(tmp_path, dtype="float32", kv_cache_dtype=mode)
    assert adapter.kv_layout.mode.value == mode
    # Half a step of each format relative to a vector's largest element: 2^-12, 2^-9, 1/510, 2^-5; INT4's errors are a
    # 19th of a vector's length. Times a few for two layers.
    bounds = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1.5e-2, "int8": 3e-2, "fp8_e4m3fn": 0.15, "int4": 0.25}
    bound = bounds[mode]
    assert relative_error(Stepper(adapter).run(TEXT, [30]), reference_logits(checkpoint)) <= bound


def test_tied_checkpoints_with_and_without_a_stored_head_are_one_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tied = {"tie_word_embeddings": True}
    found = {}
    for head in (None, "equal", "differs"):
        folder = tmp_path / str(head)
        checkpoint = tiny_checkpoint(folder, "qwen2", "awq-gemm", head=head, config=tied)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            adapter = load(folder, dtype="float32")
        warned = [r.message for r in caplog.records if "lm_head" in r.message]
        assert bool(warned) == (head == "differs"), "the flag rules; a head that differs is spoken of"
        found[head] = (adapter.info.weight_bytes, Stepper(adapter).run(TEXT, [40]))
        assert relative_error(found[head][1], reference_logits(checkpoint)) <= 1e-4
    for weight_bytes, logits in found.values():
        assert weight_bytes == found[None][0], "a spare head costs no memory"
        assert torch.equal(logits, found[None][1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"world_size": 3}, ConfigError, "num_shard: got 3, expected 1, 2 or 4: .*q_proj.*3 ranks"),
        ({"dtype": "float8"}, ConfigError, "auto, bfloat16, float16, float32"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ConfigError, r"fp8_e5m2.*take fp8_e4m3fn \(or fp8\), or int8"),
        ({"kv_cache_dtype": "q4_0"}, ConfigError, "auto, float32, bfloat16, float16, fp8_e4m3fn, int8, int4"),
        ({"block_size": 8}, ConfigError, "block_size"),
        ({"rope_factor": 2.0}, ConfigError, "rope_scaling"),
        ({"device": "cuda"}, ConfigError, "cpu"),
        ({"kernels": "quick"}, ConfigError, "quick"),
    ],
    ids=str,
)
def test_options_that_cannot_be_had_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    tiny_checkpoint(tmp_path, "llama", "awq-gemm")
    monkeypatch.setattr(quantized, "load_decoder", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        load(tmp_path, **options)


def test_an_unknown_family_is_refused_by_name_without_any_weight_file(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", config={"model_type": "llama"})
    (tmp_path / "model.safetensors").unlink()
    text = (tmp_path / "config.json").read_text().replace('"llama"', '"mamba"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"mamba.*llama, qwen2, qwen3"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.0.mlp.up_proj.scales",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("fault", ["missing", "misshapen"])
def test_a_tensor_that_is_missing_or_misshapen_is_named(tmp_path: Path, name: str, fault: str) -> None:
    tiny_checkpoint(tmp_path, "qwen2", "awq-gemm")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    wrong = tensors.pop(name)
    if fault == "misshapen":
        tensors[name] = torch.cat((wrong, wrong))
    save_file(tensors, str(file))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(tmp_path)


def test_what_was_loaded_is_said_once_and_unknown_tensors_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path, "llama", "awq-gemm", dense_modules=("q_proj",))
    file = tmp_path / "model.safetensors"
    extra = {f"vision.blocks.{i}.weight": torch.ones(4) for i in range(30)}
    save_file(load_file(file) | extra, str(file))
    with caplog.at_level(logging.INFO):
        load(tmp_path, progress=True)
    lines = [r.message for r in caplog.records if "loaded llama, 2 layers" in r.message]
    assert len(lines) == 1
    assert "2 dense, 12 int4 modules" in lines[0]
    assert len([r for r in caplog.records if "vision.blocks" in r.message]) == 1
    assert "layer" not in capfd.readouterr().err, "no progress bar where stderr is no terminal"


PEAK = """
import sys, torch
from pathlib import Path
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

options = LoadOptions(kernels=sys.argv[3])
warm = QuantizedModelAdapter.get_model(sys.argv[2], options=options)
warm.forward(torch.ones(1, 40, dtype=torch.int64))
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
before = status("VmRSS")
model = QuantizedModelAdapter.get_model(sys.argv[1], options=options)
print(model.info.weight_bytes, status("VmHWM") - before, status("VmRSS") - before)
tokens = int(sys.argv[4])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model.forward(torch.ones(1, tokens, dtype=torch.int64))
cache = model.kv_layout.bytes_per_block * (tokens // 16)
print(model.workspace_bytes(tokens, tokens) + cache, status("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def packed_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of some 60 MB, and a small one to load first, so that only the large one's own memory is measured."""
    folder = tmp_path_factory.mktemp("packed")
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    large = packed_checkpoint(folder / "large", shape | {"num_hidden_layers": 8, "vocab_size": 2048})
    return large, packed_checkpoint(folder / "small", {"hidden_size": 256, "intermediate_size": 256})


@pytest.mark.parametrize(("kernels", "tokens"), [("auto", 1024), ("torch", 128)])
def test_peak_memory_stays_near_the_packed_model_and_a_step_within_its_workspace(
    packed_models: tuple[Path, Path], kernels: str, tokens: int
) -> None:
    command = [sys.executable, "-c", PEAK, *map(str, packed_models), kernels, str(tokens)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    weights, peak, kept = map(int, lines[0].split())
    layer = 2 * (3 * 1024 * 1024 + 3 * 1024 * 2816)  # one layer's matrices in 16 bits
    if kernels == "torch":
        layer *= 2  # torch's own packing takes codes of 32 bits
    assert weights > 50e6
    assert peak <= 1.15 * weights + layer, f"{peak / 1e6:.1f} MB for {weights / 1e6:.1f} MB of weights"
    assert kept <= 1.1 * weights, "what unpacking took was given back"
    promised, used = map(int, lines[1].split())
    assert used <= promised, f"a step took {used / 1e6:.1f} MB, the workspace is said to be {promised / 1e6:.1f} MB"
