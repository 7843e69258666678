"""What the shard loads, for which options."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizer_kinds

from deepseek_tgi.config import ShardConfig
from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.server.engine_api import EngineApi
from deepseek_tgi.server.loader import Loading, Recipe
from deepseek_tgi.server.loading import Count, Report, load_engine
from deepseek_tgi.server.models import Demand, Source


def test_the_weights_folder_wins_over_the_model_id(tmp_path: Path) -> None:
    folder = tokenizer_kinds.byte_level(tmp_path)
    config = ShardConfig(
        model_id="org/elsewhere", weights_cache_override=str(folder), backend="scripted:ScriptedAdapter"
    )
    engine = load_engine(config, lambda _event, _count: None)
    assert engine.info().attention_impl == "scripted"
    engine.close()


async def test_what_the_first_model_was_to_be_stored_as_is_not_asked_of_a_later_one(tmp_path: Path) -> None:
    """A launcher passes on what it read in the first model's config; said of another it would be a false alarm."""
    folder = tokenizer_kinds.byte_level(tmp_path)
    seen: list[str | None] = []

    def load(config: ShardConfig, count: Count, report: Report | None) -> EngineApi:
        seen.append(config.quantize)
        raise CheckpointError("enough")

    config = ShardConfig(model_id="first", quantize="awq", backend="scripted:ScriptedAdapter")
    recipe = Recipe(config, load, lambda _event, _count: None)
    for wished in (None, "gptq"):
        loading = Loading(recipe, Source(str(folder), quantize=wished), Demand(None, 64, None), "cpu")
        with pytest.raises(CheckpointError, match="enough"):
            async for _ in loading.run(0):
                pass
    assert seen == [None, "gptq"]
