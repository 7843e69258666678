"""Memory that native latent attention keeps: what the library counts itself, against the arithmetic that plans use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest

from deepseek_tgi.kernels.compiler import BuildError, find_compiler
from deepseek_tgi.kernels.latent_scratch import PARTIAL_FLOATS, QUERY_FLOATS, ROOM_FLOATS, LatentSizes


@dataclass(frozen=True, slots=True)
class Call:
    """One request's step in a fresh process: `tokens` after `cached`, in one form, on so many threads."""

    sizes: LatentSizes
    tokens: int
    cached: int
    form: str
    threads: int

    def kept_bytes(self) -> int:
        """What the library holds after it."""
        run = subprocess.run(
            [sys.executable, "-c", _CHILD, json.dumps(asdict(self))], capture_output=True, text=True, check=True
        )
        return int(run.stdout)


_CHILD = """
import json, sys, torch
from deepseek_tgi.core import ForwardInputs
from deepseek_tgi.kernels.library import load
from deepseek_tgi.kernels.precision import ComputeDtype
from deepseek_tgi.kernels.select import select_kernels
from deepseek_tgi.kv.layout import KVMode, LatentLayout
from deepseek_tgi.kv.pool import KVPool

call = json.loads(sys.argv[1])
s, tokens, length = call["sizes"], call["tokens"], call["tokens"] + call["cached"]
kernels = select_kernels("cpu", ComputeDtype.FLOAT32, "native", call["threads"])
blocks = -(-length // 16)
pool = KVPool(LatentLayout(1, s["rank"], s["rope_dim"], KVMode.FLOAT32), blocks)
pool.storage.fill_(0)
weight = torch.zeros(s["num_heads"] * (s["nope_dim"] + s["v_dim"]), s["rank"])
up = kernels.pack_up(weight, s["num_heads"], s["nope_dim"])
nothing = torch.zeros(tokens, dtype=torch.int64)
inputs = ForwardInputs(
    nothing, nothing.int(), nothing, torch.tensor([0, tokens], dtype=torch.int32),
    torch.arange(blocks, dtype=torch.int32).unsqueeze(0), torch.tensor([call["cached"]], dtype=torch.int32),
    nothing[:1], tokens, length,
)
q = torch.zeros(tokens, s["num_heads"], s["rope_dim"] + s["nope_dim"])
before = load().scratch_bytes()
kernels.latent_attention(
    q, pool.latents(0), up, inputs, scale=1.0, out=torch.empty(tokens, s["num_heads"], s["v_dim"]), form=call["form"]
)
print(load().scratch_bytes() - before)
"""


def sizes(heads: int, rank: int, dims: Sequence[int], context: int) -> LatentSizes:
    rope, nope, value = dims
    return LatentSizes(heads, rank, rope, nope, value, context)


CALLS = {
    "small": (Call(sizes(5, 48, (10, 24, 40), 900), 70, 800, "absorbed", 2), 0),
    "one token": (Call(sizes(16, 512, (64, 128, 128), 4096), 1, 4000, "absorbed", 2), 0),
    "full queries": (Call(sizes(128, 512, (8, 8, 8), 256), 200, 0, "absorbed", 2), QUERY_FLOATS),
    "full partials": (Call(sizes(128, 1024, (2, 1, 1), 40_000), 1, 33_000, "absorbed", 2), PARTIAL_FLOATS),
    "full room": (Call(sizes(2, 64, (16, 16, 2000), 40_000), 40, 30_000, "expanded", 2), ROOM_FLOATS // 2),
    "expanded": (Call(sizes(16, 512, (64, 128, 128), 2048), 300, 1000, "expanded", 1), 0),
}
"""A call, and the floats that it keeps at the least: a cap that is reached."""


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skips where none is."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", CALLS)
def test_no_more_is_kept_than_planned(name: str) -> None:
    call, least = CALLS[name]
    kept, planned = call.kept_bytes() // 4, call.sizes.native_floats(call.tokens, call.threads)
    assert least <= kept <= planned
