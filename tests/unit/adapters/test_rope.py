"""Rotary tables against formulas restated in float64 and against hand-worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from deepseek_tgi.adapters.layers.rope import FIRST_ROWS, RopeTable, attention_factor, build_table
from deepseek_tgi.adapters.rope_config import RopeConfig, RopeKind

DIM = 64


def yarn_frequency(pair: int, config: RopeConfig) -> float:
    """YaRN, section 3.2 of the paper, one pair at a time: wavelengths against the trained length decide the blend."""
    plain = config.theta ** (-2 * pair / DIM)

    def pair_of(turns: float) -> float:
        return DIM / 2 * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi), config.theta)

    low = max(math.floor(pair_of(config.beta_fast)), 0)
    high = min(math.ceil(pair_of(config.beta_slow)), DIM - 1)
    slowed = min(max((pair - low) / (high - low), 0), 1)
    return slowed * plain / config.factor + (1 - slowed) * plain


@pytest.mark.parametrize("position", [0, 1, 63, 64, 1000, 2559])
def test_yarn_angles_and_factor_follow_the_paper(position: int) -> None:
    config = RopeConfig(RopeKind.YARN, theta=10000.0, factor=40.0, original_max_position_embeddings=64)
    row = build_table(config, DIM, position, position + 1)[0].double()
    factor = 0.1 * math.log(40) + 1
    for pair in range(DIM // 2):
        angle = position * yarn_frequency(pair, config)
        # float32 angles: 2^-24 of up to 2559 rad, twice.
        assert row[pair].item() == pytest.approx(factor * math.cos(angle), abs=5e-4)
        assert row[pair + DIM // 2].item() == pytest.approx(factor * math.sin(angle), abs=5e-4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(40) + 1),
        ({"factor": 1.0}, 1.0),
    ],
    ids=["plain", "given", "equal-mscales", "two-mscales", "one-mscale", "factor-1"],
)
def test_the_attention_factor_of_yarn(given: dict[str, float], expected: float) -> None:
    config = RopeConfig(
        **{"kind": RopeKind.YARN, "factor": 40.0, "original_max_position_embeddings": 64} | given  # type: ignore[arg-type]
    )
    assert attention_factor(config) == pytest.approx(expected)


def test_a_single_pair_turns_by_one_whatever_the_dynamic_base() -> None:
    config = RopeConfig(RopeKind.DYNAMIC, theta=10000.0, factor=4.0, original_max_position_embeddings=64)
    for position in (0, 63, 64, 500):
        row = build_table(config, 2, position, position + 1)[0]
        assert row.tolist() == pytest.approx([math.cos(position), math.sin(position)], abs=1e-4)


def test_linear_scaling_turns_position_p_as_plain_rope_turns_p_over_factor() -> None:
    scaled = build_table(RopeConfig(RopeKind.LINEAR, factor=4.0), DIM, 0, 401)
    plain = build_table(RopeConfig(), DIM, 0, 101)
    torch.testing.assert_close(scaled[::4], plain, atol=2e-5, rtol=0)


def test_dynamic_rope_is_plain_up_to_its_length_and_slows_by_the_ntk_rule_beyond() -> None:
    config = RopeConfig(RopeKind.DYNAMIC, theta=10000.0, factor=2.0, original_max_position_embeddings=32)
    table = build_table(config, DIM, 0, 65)
    plain = build_table(RopeConfig(theta=10000.0), DIM, 0, 65)
    assert torch.equal(table[:32], plain[:32])
    base = 10000.0 * (2 * 65 / 32 - 1) ** (DIM / (DIM - 2))  # 65 tokens are there when position 64 arrives
    for pair in (1, 7, 31):
        assert table[64, pair].item() == pytest.approx(math.cos(64 * base ** (-2 * pair / DIM)), abs=2e-5)


@pytest.mark.parametrize("kind", [RopeKind.DEFAULT, RopeKind.DYNAMIC])
def test_growing_the_table_changes_no_row(kind: RopeKind) -> None:
    config = RopeConfig(kind, factor=3.0, original_max_position_embeddings=100)
    table = RopeTable(config, DIM, 1 << 20, torch.device("cpu"))
    first = table.covering(10).clone()
    assert first.shape == (FIRST_ROWS, DIM)
    grown = table.covering(FIRST_ROWS + 1)
    assert grown.shape == (2 * FIRST_ROWS, DIM)
    assert torch.equal(grown[:FIRST_ROWS], first)
    assert torch.equal(grown, build_table(config, DIM, 0, 2 * FIRST_ROWS))
    assert table.covering(10) is grown


def test_a_short_model_gets_a_short_table() -> None:
    assert RopeTable(RopeConfig(), DIM, 128, torch.device("cpu")).covering(1).shape == (128, DIM)
