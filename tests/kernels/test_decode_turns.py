"""What decode attention composes rotations of: tables of every rope scaling, against angles in float64."""

from __future__ import annotations

import pytest
import torch

from deepseek_tgi.adapters.layers.rope import attention_factor, build_table, inverse_frequencies
from deepseek_tgi.adapters.rope_config import RopeConfig, RopeKind
from deepseek_tgi.kernels.frame import Frame, PlacedFrame
from deepseek_tgi.kernels.paged_attention.turns import TILE, Turns, TurnTables
from deepseek_tgi.kernels.pages import LayerPages
from deepseek_tgi.kv.layout import KVLayout, KVMode
from deepseek_tgi.kv.pool import KVPool

DIM = 128
LONG = 33000
SCALINGS = [
    RopeConfig(),
    RopeConfig(theta=1e6),
    RopeConfig(RopeKind.LINEAR, 1e4, 2.0),
    RopeConfig(RopeKind.LLAMA3, 5e5, 8.0, 8192),
    RopeConfig(RopeKind.YARN, 1e4, 4.0, 32768),
]


def pages(mode: KVMode) -> LayerPages:
    return KVPool(KVLayout(1, 2, DIM, DIM, mode), 2).view(0)


def turns_of(cos_sin: torch.Tensor, centre: torch.Tensor, mode: KVMode = KVMode.INT8) -> Turns | None:
    return TurnTables().of(PlacedFrame(Frame(centre), torch.empty(0), cos_sin), pages(mode))


def composed(turns: Turns, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The centre of a head at every position, as the kernel makes it but in float64, `[P, slots]`, and which pairs."""
    assert turns.heads is not None
    assert turns.starts is not None
    steps, row = turns.steps, turns.heads[head]
    # step, g, t, word, half of the tile, cosine or sine
    words = row[: steps * 512].contiguous().view(torch.float16).view(steps, 8, 4, 2, 2, 2)
    ends = words.double().sum(3).permute(3, 1, 0, 2, 4).reshape(TILE, steps * 4, 2)
    own = row[steps * 512 : steps * 544].contiguous().view(torch.float32).view(-1, 2).double()
    places = row[steps * 544 : steps * 560].contiguous().view(torch.int32).long()
    grow = row[steps * 560 :].contiguous().view(torch.float32)[0].double()
    assert float(own.abs().max()) < 2
    starts = torch.view_as_complex(turns.starts[:, places.clamp(min=0)].double())
    begun = starts * torch.view_as_complex(own * grow)
    return (begun[:, None] * torch.view_as_complex(ends.contiguous())).flatten(0, 1), places


@pytest.mark.parametrize("config", SCALINGS, ids=lambda c: f"{c.kind.value}-{c.theta:.0e}")
def test_a_start_and_a_place_behind_it_make_the_rotation(config: RopeConfig) -> None:
    """Off by what float32 leaves out of an angle, as the table itself."""
    cos_sin = build_table(config, DIM, 0, LONG)
    centre = torch.randn(2, DIM) * 300
    centre[:, 5::7] = centre[:, 64 + 5 :: 7] = 0
    centre[0, 20:64] = centre[0, 84:] = 0
    turns = turns_of(cos_sin, centre)
    assert turns is not None
    frequencies = inverse_frequencies(config, DIM).double()
    angles = torch.arange(LONG).double()[:, None] * frequencies
    turn = torch.polar(torch.full_like(angles, attention_factor(config)), angles)
    for head in range(2):
        got, places = composed(turns, head)
        used = places[places >= 0]
        want = turn[:, used] * torch.complex(centre[head, used], centre[head, 64 + used]).to(torch.complex128)
        size = torch.complex(centre[head, used], centre[head, 64 + used]).abs()
        off = (got[:LONG, : len(used)] - want).abs()
        assert bool((off <= size * (angles[:, used] * 2.0**-23 + 2.0**-19)).all())
        assert used.tolist() == ((centre[head, :64] != 0) | (centre[head, 64:] != 0)).nonzero().flatten().tolist()
        assert float(got[:, len(used) :].abs().max()) == 0.0 or got.shape[1] == len(used)


def test_elements_that_do_not_turn_are_one_pair_of_int4_alone() -> None:
    cos_sin = build_table(RopeConfig(), 96, 0, 64)
    centre = torch.zeros(2, DIM)
    centre[:, 3], centre[1, 120] = 2.0, 5.0
    int4, int8 = (turns_of(cos_sin, centre, mode) for mode in (KVMode.INT4, KVMode.INT8))
    assert int4 is not None
    assert int8 is not None
    assert composed(int4, 1)[1].tolist()[:3] == [3, 48, -1]
    assert composed(int4, 0)[1].tolist()[:2] == [3, -1]
    assert composed(int8, 1)[1].tolist()[:2] == [3, -1]
    torch.testing.assert_close(composed(int4, 1)[0][:, 1].real, torch.ones(64).double())


def test_a_base_that_grows_with_the_context_has_no_such_angles() -> None:
    config = RopeConfig(RopeKind.DYNAMIC, 1e4, 2.0, 2048)
    centre = torch.ones(2, DIM)
    assert turns_of(build_table(config, DIM, 0, 2048), centre) is not None
    assert turns_of(build_table(config, DIM, 0, 4096), centre) is None


def test_tables_shorter_than_a_tile_do() -> None:
    turns = turns_of(build_table(RopeConfig(), DIM, 0, 5), torch.ones(2, DIM))
    assert turns is not None
    got, _ = composed(turns, 0)
    angles = torch.arange(5).double()[:, None] * inverse_frequencies(RopeConfig(), DIM).double()
    want = torch.polar(torch.ones_like(angles), angles) * complex(1, 1)
    torch.testing.assert_close(got[:5], want, atol=2e-6, rtol=0)
