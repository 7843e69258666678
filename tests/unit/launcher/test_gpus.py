"""What is known of GPUs before torch is loaded, and what a plan makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracles.published import R1_DISTILL_LLAMA_8B

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.launcher import gpus
from deepseek_tgi.launcher.gpus import free_bytes, gpus_for
from deepseek_tgi.launcher.plan import make_plan

MIB = 1 << 20


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's tool that tells of two GPUs."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=memory.free ] && printf "140000\\n90000\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [
        ("cpu", 1, []),
        ("cuda", 1, [140000]),
        ("cuda", 2, [140000, 90000]),
        ("cuda:1", 1, [90000]),
        ("cuda:1", 2, []),
        ("auto", 1, []),
    ],
)
def test_each_rank_has_a_gpu(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, expected: list[int]
) -> None:
    monkeypatch.setattr(gpus.metadata, "version", lambda name: "2.13.0+cpu")
    assert gpus_for(device, ranks) == [size * MIB for size in expected]


def test_auto_takes_gpus_that_torch_was_built_for(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.metadata, "version", lambda name: "2.13.0")
    assert gpus_for("auto", 2) == [140000 * MIB, 90000 * MIB]
    assert gpus_for("auto", 3) == []


def test_no_tool_and_a_broken_one_tell_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert free_bytes() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no devices; exit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert free_bytes() == []


def test_a_plan_for_a_gpu_counts_its_memory_and_its_kernels(two_gpus: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(R1_DISTILL_LLAMA_8B))
    plan = make_plan(LauncherConfig(model_id=str(tmp_path), device="cuda"))
    assert (plan.kernels, plan.compute_dtype, plan.available_bytes) == ("cuda", "bfloat16", 140000 * MIB)
    on_cpu = make_plan(LauncherConfig(model_id=str(tmp_path), device="cpu", kernels="torch"))
    assert on_cpu.kernels == "torch"
    used = next(cache for cache in plan.caches if cache.in_use)
    # 140 GB less 16 GB of weights, in 131072 bytes a token.
    assert 700_000 < used.tokens_here < 1_000_000
