"""Kernels compiled from the launcher's first moment on, by a compiler that only writes what it is asked for."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.launcher import kernels, shards
from deepseek_tgi.launcher.main import StopSignals, stop
from deepseek_tgi.launcher.process import Child, Spec

_STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo stand-in; exit 0; fi
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""
_GPU = "#!/bin/sh\necho 100\n"


def started(tmp_path: Path, **options: Any) -> list[str]:
    """What the cache holds once the process, if there is one, has ended."""
    for name, text in (("g++", _STAND_IN), ("nvidia-smi", _GPU)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "DEEPSEEK_TGI_CACHE": str(tmp_path / "cache")}
    environ.pop("CXX", None)
    child = kernels.start(LauncherConfig(**options), environ)
    if child is None:
        return []
    assert child.wait(60.0)
    assert child.exit_code() == 0, child.stderr_text()
    cache = tmp_path / "cache"
    return sorted(path.suffix for path in cache.iterdir()) if cache.exists() else []


def test_the_library_is_in_the_cache_before_a_shard_asks(tmp_path: Path) -> None:
    assert started(tmp_path, backend="deepseek-quant", device="cpu") == [".lock", ".so"]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "other"},
        {"backend": "deepseek-quant", "kernels": "torch"},
        {"backend": "deepseek-quant", "device": "cuda"},
    ],
    ids=["another backend's shard", "torch's own operations", "a GPU"],
)
def test_nothing_is_compiled_that_no_shard_will_load(tmp_path: Path, options: dict[str, str]) -> None:
    assert started(tmp_path, **options) == []


@pytest.mark.parametrize(("seconds", "told"), [(0.0, []), (0.1, ["deaf did not end in time: killed"])])
def test_who_is_given_no_time_to_end_is_not_said_to_be_late(
    seconds: float, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = tmp_path / "deaf"
    argv = ("/bin/sh", "-c", f"trap '' TERM; : > {deaf}; sleep 60")
    child = Child(Spec("deaf", argv, dict(os.environ), shards.relog))
    deadline = time.monotonic() + 30.0
    while not deaf.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stop(child, seconds, StopSignals())
    assert child.exit_code() is not None
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == told
