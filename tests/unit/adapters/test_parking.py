"""Weights that leave their device and come back bit for bit; the device is the CPU, where all of it works unpinned."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from builders import tiny_checkpoint
from launched_server import anonymous_bytes

from deepseek_tgi.adapters import parking
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.gpu_steps import GpuModel, GpuSteps
from deepseek_tgi.adapters.parking import DeviceMemory, ParkedWeights, storages_of
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.errors import ResourceError
from deepseek_tgi.kernels.select import select_kernels

CPU = torch.device("cpu")
TORCH = LoadOptions(dtype="float32", kernels="torch", num_threads=1)
IDS = torch.tensor([[5, 9, 31, 7, 12, 40, 3]])
KINDS = [
    ("llama", None),
    ("qwen2", "awq-gemm"),
    ("qwen3", "gptq"),
    ("llama", "fp8-row"),
    ("deepseek_v2", "awq-gemm"),
    ("deepseek_v3", None),
]


def unheard() -> None:
    return


class Scarce(DeviceMemory):
    """A device that has no memory left when it is asked for the `fails`-th time, counted from 1."""

    def __init__(self, fails: int) -> None:
        super().__init__(CPU)
        self.fails = fails
        self.asked = 0

    def renew(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self.asked += 1
        if self.asked == self.fails:
            raise ResourceError("nothing left")
        super().renew(storage, num_bytes)


def loaded(folder: Path, family: str, quant: str | None) -> QuantizedModelAdapter:
    checkpoint = tiny_checkpoint(folder / "model", family, quant)
    return QuantizedModelAdapter.get_model(str(checkpoint.path), options=TORCH)


def steps_of(adapter: QuantizedModelAdapter) -> GpuSteps:
    """What would take its steps on a GPU."""
    kernels = select_kernels("cpu", wish="torch", num_threads=1)
    return GpuSteps(GpuModel(adapter._decoder, kernels, adapter.info.vocab_size, 16, ()), CPU)


def held_bytes() -> int:
    """Of this process, without what glibc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return anonymous_bytes(os.getpid())


def bytes_of(storages: Sequence[torch.UntypedStorage]) -> list[bytes]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone().numpy().tobytes() for storage in storages]


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randint(0, 256, (37 * n + 1,), dtype=torch.uint8) for n in range(6)]


@pytest.mark.parametrize(("family", "quant"), KINDS)
def test_every_weight_leaves_and_comes_back_as_it_was(tmp_path: Path, family: str, quant: str | None) -> None:
    adapter = loaded(tmp_path, family, quant)
    steps = steps_of(adapter)
    want = adapter.forward(IDS)
    storages = storages_of(adapter._decoder.weights, (), CPU)
    before = bytes_of(storages)
    freed = steps.park(unheard)
    assert freed == sum(map(len, before))
    assert freed >= adapter.info.weight_bytes, "what each part counts of its own"
    assert [storage.nbytes() for storage in storages] == [0] * len(storages)
    steps.restore(unheard)
    assert bytes_of(storages) == before
    assert torch.equal(adapter.forward(IDS), want)


def test_memory_is_really_free_meanwhile(tmp_path: Path) -> None:
    size = 64 << 20

    class Elsewhere(DeviceMemory):
        """A host whose memory does not count as this process's: it lies in a file."""

        def host(self, num_bytes: int) -> torch.Tensor:
            return torch.from_file(str(tmp_path / "host"), shared=True, size=num_bytes, dtype=torch.uint8)

    weight = torch.randint(0, 256, (size,), dtype=torch.uint8)
    view, kept = weight.view(64, -1)[3:5], weight.clone()
    full = held_bytes()
    parked = ParkedWeights([weight.untyped_storage()], Elsewhere(CPU))
    assert parked.park(unheard) == size
    assert full - held_bytes() > 0.9 * size
    parked.restore(unheard)
    assert full - held_bytes() < 0.1 * size
    assert torch.equal(weight, kept)
    assert torch.equal(view, kept.view(64, -1)[3:5])


def test_pieces_add_up_and_each_is_heard_of(monkeypatch: pytest.MonkeyPatch, tensors: list[torch.Tensor]) -> None:
    monkeypatch.setattr(parking, "PIECE_BYTES", 64)
    before, heard = [tensor.clone() for tensor in tensors], [0]

    def told() -> None:
        heard[0] += 1

    parked = ParkedWeights([tensor.untyped_storage() for tensor in tensors], DeviceMemory(CPU))
    parked.park(told)
    pieces = sum(-(-tensor.numel() // 64) for tensor in before)
    assert heard == [pieces]
    parked.restore(told)
    assert heard == [2 * pieces]
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("fails", [1, 4, 6])
def test_a_device_without_room_leaves_everything_parked_and_may_be_asked_again(
    tensors: list[torch.Tensor], fails: int
) -> None:
    before = [tensor.clone() for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]
    parked = ParkedWeights(storages, Scarce(fails))
    parked.park(unheard)
    with pytest.raises(ResourceError, match="nothing left"):
        parked.restore(unheard)
    assert [storage.nbytes() for storage in storages] == [0] * len(storages)
    parked.restore(unheard)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_a_host_without_room_changes_nothing(tensors: list[torch.Tensor]) -> None:
    class Full(DeviceMemory):
        def host(self, num_bytes: int) -> torch.Tensor:
            raise ResourceError(f"no {num_bytes} bytes")

    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ResourceError):
        ParkedWeights([tensor.untyped_storage() for tensor in tensors], Full(CPU)).park(unheard)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_memory_that_several_refer_to_moves_once_and_what_kernels_hold_stays() -> None:
    table, other = torch.zeros(8, 4), torch.zeros(3)
    kernels = {"scratch": other}
    model = ({"embedding": table, "head": table.t()}, [table[2:4], other], kernels)
    (storage,) = storages_of(model, (kernels,), CPU)
    assert storage.data_ptr() == table.data_ptr()


def test_on_a_cpu_weights_stay_where_they_are(tmp_path: Path) -> None:
    adapter = loaded(tmp_path, "llama", "awq-gemm")
    want = adapter.forward(IDS)
    assert adapter.park_weights(unheard) == 0
    assert torch.equal(adapter.forward(IDS), want)
    adapter.restore_weights(unheard)
