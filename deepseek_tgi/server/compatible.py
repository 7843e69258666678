"""What one model must share with another to take its place unnoticed by a router that was told of one model only."""

from __future__ import annotations

from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.server.integrity import digest
from deepseek_tgi.server.loader import Loaded
from deepseek_tgi.server.models import Held


def check_compatible(before: Held, after: Held, loaded: Loaded) -> None:
    """Raise `ConfigError` naming what a router that was told of `before` alone could not serve in `after`."""
    assert before.engine is not None
    old, facts = before.engine.facts(), loaded.facts
    folder = resolve_folder(before.source.model_id, before.source.revision)
    promised, given = before.limits, after.limits
    assert promised is not None
    assert given is not None
    rules = (
        ("vocabulary", old.vocab_size, facts.vocab_size),
        ("tokenizer", digest(folder / "tokenizer.json"), loaded.tokenizer_sha256),
        ("end tokens", sorted(old.eos_token_ids), sorted(facts.eos_token_ids)),
        ("block size", before.info.block_size, after.info.block_size),
        ("dtype and attention", before.info.attention_impl, after.info.attention_impl),
        ("longest request", promised.max_total_tokens, given.max_total_tokens),
        ("longest prompt", promised.max_input_tokens, given.max_input_tokens),
        ("cache tokens", promised.max_supported_total_tokens, given.max_supported_total_tokens),
    )
    differences = [f"{name} {mine} and not {theirs}" for name, theirs, mine in rules if mine != theirs]
    if differences:
        raise ConfigError(
            f"{after.source.model_id} cannot follow {before.source.model_id} behind a router that was told of one "
            f"model: it has {'; '.join(differences)}"
        )
