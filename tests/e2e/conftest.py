"""Servers that run for the whole session: one with a tiny random model, one with the small real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_server import LaunchedServer

LIMITS = ("--max-input-tokens", "480", "--max-total-tokens", "512", "--max-concurrent-requests", "8")
KV_MEMORY = "2MiB"
"""About four full-length requests of the tiny model, so that a leak of blocks is felt soon."""


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[LaunchedServer]:
    """A random two-layer model; says nothing sensible, quickly."""
    folder = tmp_path_factory.mktemp("tiny-server")
    extra = [*LIMITS, "--kv-memory", KV_MEMORY, "--kv-cache-dtype", "float32"]
    running = LaunchedServer.start(tiny_model_dir, folder, extra)
    yield running
    running.stop()


@pytest.fixture
def server(tiny_server: LaunchedServer) -> Iterator[LaunchedServer]:
    """The tiny server, which must be the same one, alive, after the test."""
    children = set(tiny_server.children())
    yield tiny_server
    assert tiny_server.process.poll() is None, tiny_server.words()
    assert set(tiny_server.children()) == children, "a process of the server was lost or added"


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, real_model_dir: Path) -> Iterator[LaunchedServer]:
    """The small real model, served from its AWQ weights."""
    folder = tmp_path_factory.mktemp("real-server")
    # Warm-up runs the largest step, which takes minutes on a CPU with short vectors.
    limits = ["--max-total-tokens", "1024", "--max-input-tokens", "1000", "--max-batch-prefill-tokens", "1000"]
    running = LaunchedServer.start(real_model_dir, folder, limits)
    yield running
    running.stop()
