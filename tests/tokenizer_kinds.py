"""Small real tokenizers, written to a folder the way checkpoints carry them.

`byte_level` is the GPT-2/DeepSeek/Qwen kind: one token a byte, some words, no normalisation. `byte_fallback` is the
Llama-2 kind: words with a leading `▁`, and `<0xNN>` for everything else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
WORDS = ("Hello", "world", "the", "stop", "is", "Par", "one", "two")


def byte_level(folder: Path, **config: Any) -> Path:
    """Write a byte-level BPE: ids 0-2 are BOS, EOS, PAD, 3-258 the bytes in GPT-2's order, then word pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([BOS, EOS, PAD, *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in [*WORDS, *("Ġ" + w for w in WORDS)]:
        left = word[0]
        for right in word[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _write(backend, folder, config)


def byte_fallback(folder: Path, **config: Any) -> Path:
    """Write a Llama-2 style BPE with `<0xNN>` tokens for characters that have none of their own."""
    tokens = ["<unk>", BOS, EOS, *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzHPW"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for word in ["▁" + w for w in WORDS]:
        left = word[0]
        for right in word[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _write(backend, folder, {"unk_token": "<unk>", **config})


def _write(backend: Tokenizer, folder: Path, config: dict[str, Any]) -> Path:
    specials = [t for t in (BOS, EOS, PAD) if backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    settings = {k: v for k, v in {**names, **config}.items() if v is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
