"""From a GGUF vocabulary to `tokenizer.json` and `tokenizer_config.json`.

Two models of vocabulary are read: `gpt2` (byte-level BPE with its merges), whose splitting rules GGUF only names, so
that each name needs an entry in `pre_tokenizers`, and `llama` (sentencepiece BPE with scores), whose merges are
derived from the scores. An unknown name is refused: a near-enough rule would give other ids without a word.
"""

from __future__ import annotations

from array import array

from deepseek_tgi.convert.gguf_config import Metadata
from deepseek_tgi.convert.gguf_file import GgufFile
from deepseek_tgi.convert.pre_tokenizers import PRE_TOKENIZERS
from deepseek_tgi.errors import CheckpointError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"
Json = dict[str, object]


def read_tokenizer(file: GgufFile) -> tuple[Json, Json]:
    """`tokenizer.json` and `tokenizer_config.json`.

    Raises: `UnsupportedModelError` for a vocabulary or splitting rule without an entry, `CheckpointError`.
    """
    meta = Metadata(file.path, file.metadata)
    tokens = meta.texts("tokenizer.ggml.tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if ids[token] != index)
        raise CheckpointError(f"{file.path}: token {twice!r} appears twice in tokenizer.ggml.tokens")
    if len(tokens) > file.tensors["token_embd.weight"].shape[0]:
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but fewer rows in token_embd.weight")
    model = meta.text("tokenizer.ggml.model")
    if model == "gpt2":
        parts, add_bos = _byte_level(meta, ids)
    elif model == "llama":
        parts, add_bos = _sentencepiece(meta, ids), True
    else:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not implemented; gpt2 and llama are"
        )
    config = _tokenizer_config(meta, tokens, add_bos)
    document: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(meta, tokens),
        **parts,
        "post_processor": _template(config, ids) or parts.get("post_processor"),
    }
    return document, config


def _byte_level(meta: Metadata, ids: dict[str, int]) -> tuple[Json, bool]:
    name = meta.text("tokenizer.ggml.pre", default="default")
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{meta.path}: tokenizer.ggml.pre {name!r} is not implemented; known are {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [merge.split(" ") for merge in meta.texts("tokenizer.ggml.merges")]
    if not all(len(pair) == 2 and pair[0] in ids and pair[1] in ids and "".join(pair) in ids for pair in merges):
        meta.fail("tokenizer.ggml.merges", "pairs of known tokens that join to known tokens")
    steps: list[Json] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.splits
    ]
    if rule.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    byte_level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps.append({**byte_level, "use_regex": rule.gpt2_rule})
    parts: Json = {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {**byte_level, "trim_offsets": False},
        "decoder": byte_level,
        "model": {**_bpe(ids, merges), "ignore_merges": rule.ignore_merges},
    }
    return parts, rule.add_bos


def _sentencepiece(meta: Metadata, ids: dict[str, int]) -> Json:
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", default=True)
    prepend: list[Json] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = meta.integer("tokenizer.ggml.unknown_token_id", default=0, low=0)
    unknown_token = next((token for token, index in ids.items() if index == unknown), None)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            **_bpe(ids, _merges_from_scores(meta, ids)),
            "unk_token": unknown_token,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(ids: dict[str, int], merges: list[list[str]]) -> Json:
    return {"type": "BPE", "dropout": None, "unk_token": None, "vocab": ids, "merges": merges}


def _merges_from_scores(meta: Metadata, ids: dict[str, int]) -> list[list[str]]:
    """Sentencepiece joins the pair whose result scores best: so every way to split a piece ranks by its score."""
    scores = meta.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, array) or scores.typecode not in "fd" or len(scores) != len(ids):
        meta.fail("tokenizer.ggml.scores", f"a list of {len(ids)} numbers")
    ranked: list[tuple[float, int, int, list[str]]] = []
    for piece, index in ids.items():
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right, [piece[:cut], piece[cut:]]))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in ranked]


def _added_tokens(meta: Metadata, tokens: list[str]) -> list[Json]:
    kinds = meta.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        return []
    if not isinstance(kinds, array) or len(kinds) != len(tokens):
        meta.fail("tokenizer.ggml.token_type", f"a list of {len(tokens)} integers")
    flags: Json = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kinds[index] == _CONTROL}
        for index, token in enumerate(tokens)
        if kinds[index] in (_CONTROL, _USER_DEFINED)
    ]


def _tokenizer_config(meta: Metadata, tokens: list[str], add_bos: bool) -> Json:
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": meta.flag("tokenizer.ggml.add_bos_token", default=add_bos),
        "add_eos_token": meta.flag("tokenizer.ggml.add_eos_token", default=False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.integer(f"{meta.text('general.architecture')}.context_length"),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = meta.optional_id(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            if index >= len(tokens):
                meta.fail(f"tokenizer.ggml.{name}_token_id", f"an id below {len(tokens)}")
            config[f"{key}_token"] = tokens[index]
    if "tokenizer.chat_template" in meta.values:
        config["chat_template"] = meta.text("tokenizer.chat_template")
    return config


def _template(config: Json, ids: dict[str, int]) -> Json | None:
    """The post-processor that adds BOS and EOS where the vocabulary asks for them."""
    before = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    after = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if not before and not after:
        return None

    def piece(token: object, part: int) -> Json:
        return {"SpecialToken": {"id": token, "type_id": part}}

    def framed(part: int, sequence: str) -> list[Json]:
        inner: Json = {"Sequence": {"id": sequence, "type_id": part}}
        return [*(piece(token, part) for token in before), inner, *(piece(token, part) for token in after)]

    return {
        "type": "TemplateProcessing",
        "single": framed(0, "A"),
        "pair": framed(0, "A") + framed(1, "B"),
        "special_tokens": {
            str(token): {"id": token, "ids": [ids[str(token)]], "tokens": [token]} for token in [*before, *after]
        },
    }
