"""Other people's kernels on the same GPU, where their packages can be imported: FlashInfer's attention, Marlin's INT4.

    python -m tests.benchmarks.gpu.peers [--json FILE]

FlashInfer (`flashinfer-python`) compiles its kernels at first use, which takes minutes without its cache. `marlin` is
the package of its authors: half precision, symmetric groups of 128; its copies with a cache policy are illegal
instructions on Hopper, so there it has to be built with plain ones. Sizes are those of the other benchmarks; every
launch of a graph reads other memory, as there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu.timing import copy_bytes_per_s, graph_us
from tests.benchmarks.measure import circumstances

SCALE = 128**-0.5
DECODES = ((1, 1024), (1, 8192), (32, 8192), (32, 32768), (128, 2048))
LATENTS = ((16, 1, 8192), (16, 32, 8192), (16, 32, 32768), (16, 128, 2048), (128, 32, 8192), (128, 32, 32768))
PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 16, 32, 64, 256, 1024, 4096)
GROUP = 128
ROTATED_BYTES = 320 << 20


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what can be imported, print, and save with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, dest="out")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {"circumstances": circumstances(), "copy_bytes_per_s": copy_bytes_per_s(), "rows": []}
    print(f"copies move {result['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    for package, measure in (("flashinfer", flashinfer_rows), ("marlin", marlin_rows)):
        try:
            peer = import_module(package)
        except ImportError as error:
            print(f"{package}: not measured, {error}")
            continue
        version = str(getattr(peer, "__version__", ""))
        for row in tried(package, measure(peer)):
            print(f"{package} {version}: {row['what']:44} {row['us']:8.1f} us", flush=True)
            result["rows"].append({"package": package, "version": version, **row})
            if args.out:  # at once: a kernel that fails takes the device's context with it
                args.out.write_text(json.dumps(result, indent=1))


def tried(package: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows as far as the peer gets."""
    try:
        yield from rows
    except (RuntimeError, TypeError, AttributeError, ImportError, OSError) as error:
        print(f"{package}: stopped, {type(error).__name__}: {str(error).splitlines()[0]}")


def flashinfer_rows(peer: Any) -> Iterator[dict[str, Any]]:
    """Decode over pages of 16 tokens, 32 query and 8 key heads of 128; latents in pages of 64."""
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for batch, context in DECODES:
            us = flashinfer_decode(peer, workspace, dtype, batch, context)
            name = "bf16" if dtype == torch.bfloat16 else "fp8"
            yield {"what": f"decode {name} {batch} x {context}", "us": us}
            torch.cuda.empty_cache()
    for heads, batch, context in LATENTS:
        us = flashinfer_latents(peer, workspace, heads, batch, context)
        yield {"what": f"latents bf16, {heads} heads, {batch} x {context}", "us": us}
        torch.cuda.empty_cache()


def flashinfer_decode(peer: Any, workspace: torch.Tensor, dtype: torch.dtype, batch: int, context: int) -> float:
    """One layer with tensor cores, its pages in no order."""
    size, heads, kv_heads, width = 16, 32, 8, 128
    blocks = batch * context // size
    layers = copies_of(2 * blocks * size * kv_heads * width * dtype.itemsize)
    caches = [
        tuple(torch.randn(blocks, size, kv_heads, width, device="cuda").to(dtype) for _ in range(2))
        for _ in range(layers)
    ]
    decode = peer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(0, blocks + 1, context // size, dtype=torch.int32)
    last = torch.full((batch,), size, dtype=torch.int32)
    decode.plan(
        starts, torch.randperm(blocks, dtype=torch.int32, device="cuda"), last, heads, kv_heads, width, size,
        q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    q = torch.randn(batch, heads, width, device="cuda").bfloat16()
    return graph_us([partial(decode.run, q, cache) for cache in caches])


def flashinfer_latents(peer: Any, workspace: torch.Tensor, heads: int, batch: int, context: int) -> float:
    """One layer of absorbed latent attention."""
    size, rank, rope = 64, 512, 64
    blocks = batch * context // size
    layers = copies_of(blocks * size * (rank + rope) * 2)
    caches = [
        tuple(torch.randn(blocks, size, width, device="cuda").bfloat16() for width in (rank, rope))
        for _ in range(layers)
    ]
    attend = peer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    queries = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    pages = torch.arange(0, blocks + 1, context // size, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    attend.plan(
        queries, pages, torch.randperm(blocks, dtype=torch.int32, device="cuda"), lengths, heads, rank, rope, size,
        False, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    absorbed, rotary = (torch.randn(batch, heads, width, device="cuda").bfloat16() for width in (rank, rope))
    return graph_us([partial(attend.run, absorbed, rotary, *cache) for cache in caches])


def marlin_rows(peer: Any) -> Iterator[dict[str, Any]]:
    """Products by random weights; the format cannot be wrong for a time."""
    for name, (n, k) in PRODUCTS.items():
        weights = [
            (
                torch.randint(-(2**31), 2**31 - 1, (k // 16, n * 2), dtype=torch.int32, device="cuda"),
                (torch.rand(k // GROUP, n, device="cuda") * 0.01).half(),
            )
            for _ in range(copies_of(n * k // 2))
        ]
        locks = torch.zeros(n // 128 * 16, dtype=torch.int32, device="cuda")
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda").half()
            out = torch.empty(rows, n, device="cuda", dtype=torch.float16)
            calls: list[Callable[[], object]] = [partial(peer.mul, x, b, out, s, locks) for b, s in weights]
            yield {"what": f"{name} {n} x {k}, {rows} rows", "us": graph_us(calls[: max(1, 4096 // rows)])}


def copies_of(num_bytes: int) -> int:
    """How many of so many bytes no cache holds."""
    return max(1, min(32, -(-ROTATED_BYTES // num_bytes)))


if __name__ == "__main__":
    main()
