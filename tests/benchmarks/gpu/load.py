"""Loading an AWQ checkpoint in the shape of R1-Distill-Llama-8B from disk to the GPU, beside what disk and link allow.

    python -m tests.benchmarks.gpu.load [--model llama] [--layers 0] [--folder DIR] [--json FILE]

The files hold random numbers; they are written first, and kept if a folder is named. `warm` finds them in the page
cache, `cold` has had them dropped from it. The floor is the bytes over the slower of the disk (cold) or the host's own
copying (warm) and the link. `host` is the time in which the host read files and filled pinned memory; what it had to
wait for in it, and the rest of the whole, is work that hid behind nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from deepseek_tgi.adapters import loading, quantized
from deepseek_tgi.adapters.base import LoadOptions
from deepseek_tgi.adapters.quantized import QuantizedModelAdapter
from deepseek_tgi.adapters.transfer import Transfer
from tests.benchmarks.gpu.random_model import RandomCheckpoint, write_folder
from tests.benchmarks.gpu.whole_model import MODELS, write_test_tokenizer
from tests.benchmarks.measure import circumstances

SHARD_BYTES = 1 << 30
CHUNK_BYTES = 16 << 20


def main(argv: Sequence[str] | None = None) -> None:
    """Write, load warm and cold, print; with `--json`, save as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--layers", type=int, default=0, help="cut the model short")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path, dest="out")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or Path(own)
        paths = sorted(folder.glob("*.safetensors")) or written(folder, args.model, args.layers, args.device)
        rows = [loaded(folder, paths, how, args.device) for how in ("first", "warm", "warm", "cold")]
    if args.out:
        args.out.write_text(json.dumps({"circumstances": circumstances(), "loads": rows}, indent=1))


def written(folder: Path, model: str, layers: int, device: str) -> list[Path]:
    """Files of a random checkpoint, written through to the disk."""
    write_folder(folder, MODELS[model], write_test_tokenizer, layers)
    started = time.perf_counter()
    checkpoint = RandomCheckpoint(folder, None if device == "cpu" else Transfer(torch.device("cuda")))
    paths = []
    shards = list(_shards(checkpoint))
    for number, names in enumerate(shards, 1):
        paths.append(folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        save_file({name: checkpoint.tensor(name).cpu() for name in names}, paths[-1])
    index = {name: path.name for path, names in zip(paths, shards, strict=True) for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    os.sync()
    size = sum(path.stat().st_size for path in paths)
    print(f"wrote {size / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s")
    return paths


def _shards(checkpoint: RandomCheckpoint) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in checkpoint.names():
        names.append(name)
        size += checkpoint.num_bytes_of(name)
        if size >= SHARD_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def loaded(folder: Path, paths: Sequence[Path], how: str, device: str) -> dict[str, Any]:
    """One load. `first` builds kernels as well."""
    size = sum(path.stat().st_size for path in paths)
    source = disk_rate(paths) if how == "cold" else memory_rate(paths)
    if how == "cold":
        drop(paths)
    link = link_rate() if torch.cuda.is_available() and device != "cpu" else float("inf")
    moves: list[Transfer] = []
    spent: list[float] = []

    def transfer(where: torch.device) -> Transfer:
        moves.append(Transfer(where))
        return moves[-1]

    load_decoder = loading.load_decoder

    def timed_load(*arguments: Any) -> Any:
        started = time.perf_counter()
        decoder = load_decoder(*arguments)
        spent.append(time.perf_counter() - started)
        return decoder

    started = time.perf_counter()
    with mock.patch.object(quantized, "Transfer", transfer), mock.patch.object(quantized, "load_decoder", timed_load):
        adapter = QuantizedModelAdapter.get_model(str(folder), options=LoadOptions(device=device))
    whole = time.perf_counter() - started
    adapter.close()
    floor = size / min(source, link)
    host = moves[0].host_s if moves else 0.0
    print(
        f"{how:5s}: {whole:6.2f} s in all, weights {spent[0]:6.2f} s (host {host:.2f} s), floor {floor:.2f} s "
        f"(source {source * 1e-9:.1f} GB/s, link {link * 1e-9:.1f} GB/s): {floor / spent[0]:.0%} of the slower"
    )
    return {
        "how": how, "bytes": size, "whole_s": whole, "weights_s": spent[0], "host_s": host, "floor_s": floor,
        "source_bytes_per_s": source, "link_bytes_per_s": link,
    }  # fmt: skip


def drop(paths: Sequence[Path]) -> None:
    """Have the kernel forget what it caches of the files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_rate(paths: Sequence[Path]) -> float:
    """Bytes a second of reading the first file from the disk, one chunk after the other."""
    drop(paths[:1])
    return _read_rate(paths[0])


def memory_rate(paths: Sequence[Path]) -> float:
    """As `disk_rate`, from the page cache."""
    _read_rate(paths[0])
    return _read_rate(paths[0])


def link_rate() -> float:
    """Bytes a second from pinned memory to the GPU."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, host.numel() / (time.perf_counter() - started))
    return best


def _read_rate(path: Path) -> float:
    buffer = bytearray(CHUNK_BYTES)
    started, size = time.perf_counter(), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
    return size / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
