"""What the shard loads, for which options."""

from __future__ import annotations

from pathlib import Path

import tokenizer_kinds

from deepseek_tgi.config import ShardConfig
from deepseek_tgi.server.loading import load_engine


def test_the_weights_folder_wins_over_the_model_id(tmp_path: Path) -> None:
    folder = tokenizer_kinds.byte_level(tmp_path)
    config = ShardConfig(
        model_id="org/elsewhere", weights_cache_override=str(folder), backend="scripted:ScriptedAdapter"
    )
    engine = load_engine(config, lambda _event, _count: None)
    assert engine.info().attention_impl == "scripted"
    engine.close()
