"""A tokenizer small enough to reason about: 256 bytes, a few merges, four special tokens.

Ids: byte b is token b, merged tokens follow from 256 on, the specials come last.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

MERGES = (
    ("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("o", "n"), ("r", "e"), ("Ġ", "t"),
    ("Ġ", "a"), ("Ġt", "he"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("in", "g"), ("Ġ", "w"),
)  # fmt: skip
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(256 + len(MERGES), 256 + len(MERGES) + len(SPECIALS))
VOCAB_SIZE = IM_END_ID + 1

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's own table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


def build_tokenizer(add_bos: bool = True) -> Tokenizer:
    """Byte-level BPE over 256 bytes; puts `<s>` in front of a text if `add_bos`."""
    vocab = {c: i for i, c in enumerate(_byte_characters())}
    for left, right in MERGES:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
        )
    return tokenizer


def write_tokenizer(folder: Path, add_bos: bool = True, pad_token: str | None = None) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with a chat template that opens with BOS)."""
    build_tokenizer(add_bos).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": pad_token,
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
