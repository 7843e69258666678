"""What becomes of tests and benchmarks of GPU kernels on a machine that has no GPU, or too few."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from gpu_path import ROOT

from tests.benchmarks.gpu import __main__ as gpu_benchmarks


def test_tests_of_a_gpu_are_skipped_and_say_why() -> None:
    command = [sys.executable, "-m", "pytest", "tests/unit/logits/test_gpu_pipeline.py", "-m", "gpu", "-n", "0"]
    command += ["-p", "no:cacheprovider"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
    assert "needs an NVIDIA GPU: torch" in done.stdout
    assert " skipped" in done.stdout.splitlines()[-1]
    assert " passed" not in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("there", "arguments", "status", "runs", "left_out"),
    [
        (0, (), 1, [], [part.module for part in gpu_benchmarks.PARTS]),
        (0, ("--parts", "moe"), 1, [], ["moe"]),
        (1, (), 0, [part.module for part in gpu_benchmarks.PARTS if part.module != "ranks"], ["ranks"]),
        (1, ("--parts", "moe", "ranks"), 1, ["moe"], ["ranks"]),
        (2, ("--parts", "ranks"), 0, ["ranks"], []),
    ],
    ids=["none", "none, one part", "one", "one, parts", "two"],
)  # fmt: skip
def test_benchmarks_that_cannot_run_are_named(
    there: int, arguments: tuple[str, ...], status: int, runs: list[str], left_out: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ran: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[2].rpartition(".")[2])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_benchmarks.main(arguments) == status
    said = capsys.readouterr().out
    assert ran == runs
    assert (f"not run: {', '.join(left_out)}\n" in said) == bool(left_out)
    for name in left_out:
        assert f"== {name}\nneeds {2 if name == 'ranks' else 1} GPU" in said
