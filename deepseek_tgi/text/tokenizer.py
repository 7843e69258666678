"""Text to token ids and back, from a checkpoint's own files, without transformers.

Choice: `tokenizer.json` decides everything except the special tokens around a text, where the flags of
`tokenizer_config.json` rule for Llama-class tokenizers. DeepSeek's files name that class, ask for a BOS there and carry
a `tokenizer.json` that adds none: obeying only the latter would drop the BOS the model was trained with. Rejected:
`AutoTokenizer`, which costs seconds of import and answers differently between its major versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from deepseek_tgi.errors import CheckpointError, RequestError

LLAMA_CLASSES = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
UNLIMITED_LENGTH = 10**9
"""Lengths above this are transformers' way of saying "no limit"."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A token and the bytes of the input it came from; tokens that were added span nothing (0, 0)."""

    id: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What the JSON files beside `tokenizer.json` say; ids are looked up later."""

    names: dict[str, str]
    tokenizer_class: str | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    added_tokens: tuple[tuple[int, str, bool], ...]
    model_max_length: int | None
    listed_eos_ids: tuple[int, ...]
    fallback_eos_ids: tuple[int, ...]


class TextTokenizer:
    """A checkpoint's tokenizer. Never changed after construction, so any thread may use it at any time."""

    def __init__(self, backend: Tokenizer, settings: TokenizerSettings) -> None:
        self._settings = settings
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        _complete_vocabulary(backend, settings)
        _apply_llama_flags(backend, settings)
        added = backend.get_added_tokens_decoder()
        specials = {token_id for token_id, token in added.items() if token.special}
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.unk_token_id = self._named_id("unk_token")
        named = {self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id}
        self._special_ids = frozenset(specials | {i for i in named if i is not None})
        self._vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        self._prefix, self._suffix = _surrounding_ids(backend)
        self._texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> TextTokenizer:
        """Read `tokenizer.json` and its neighbours from a checkpoint folder.

        Raises: `CheckpointError` naming the file that is missing, not JSON or not a tokenizer.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(
                f"{file}: cannot be read ({reason}); expected the `tokenizers` file every checkpoint of a supported "
                "family carries; saving the tokenizer again with transformers' `save_pretrained` writes it"
            ) from error
        return cls(_parse_backend(file, text), read_settings(folder))

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included. A model's own vocabulary may be padded beyond it."""
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids reported as special: flagged so, or named in `tokenizer_config.json`."""
        return self._special_ids

    @property
    def model_max_length(self) -> int | None:
        """The checkpoint's own length limit in tokens, None if it has none."""
        return self._settings.model_max_length

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation: the list in `generation_config.json`, else the tokenizer's, else the config's."""
        if self._settings.listed_eos_ids:
            return frozenset(self._settings.listed_eos_ids)
        if self.eos_token_id is not None:
            return frozenset({self.eos_token_id})
        return frozenset(self._settings.fallback_eos_ids)

    def is_special(self, token_id: int) -> bool:
        """True for ids that are control marks and not text."""
        return token_id in self._special_ids

    def token_id(self, token: str) -> int | None:
        """Id of an exact vocabulary entry, None if there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def encode(self, text: str, add_special_tokens: bool = True, truncate: int | None = None) -> list[int]:
        """Ids of `text`; with `truncate` (tokens, 0 or None for no limit) the *last* ones, added specials kept.

        Raises: `RequestError` for text that is not valid Unicode.
        """
        _check_unicode(text)
        # `encode` keeps Python's lock for as long as a prompt takes; the batch calls let other threads run.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if not truncate or len(ids) <= truncate:
            return ids
        prefix, suffix = (self._prefix, self._suffix) if add_special_tokens else ([], [])
        body = ids[len(prefix) : len(ids) - len(suffix)]
        room = truncate - len(prefix) - len(suffix)
        kept = body[len(body) - room :] if room > 0 else []
        return [*prefix, *kept, *suffix][:truncate]

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[TokenSpan]:
        """Tokens with the UTF-8 byte range of `text` each came from; added specials have an empty range.

        Raises: `RequestError` for text that is not valid Unicode.
        """
        _check_unicode(text)
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        at = range(len(text) + 1)
        byte_at = at if text.isascii() else list(accumulate((len(c.encode()) for c in text), initial=0))
        return [
            TokenSpan(token_id, text[a:b], byte_at[a], byte_at[b])
            for token_id, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids` read together. Ids outside the vocabulary give nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one id decoded alone, specials kept; remembered, since the same few thousand come again."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id])
        return text

    def to_json(self) -> str:
        """The tokenizer as a `tokenizer.json` text, for libraries that read that format."""
        text: str = self._backend.to_str()
        return text

    def _named_id(self, name: str) -> int | None:
        token = self._settings.names.get(name)
        return None if token is None else self.token_id(token)


def read_settings(folder: Path) -> TokenizerSettings:
    """Collect what a checkpoint's small JSON files say about its tokenizer; absent files say nothing.

    Raises: `CheckpointError` for a file that is there but is not a JSON object.
    """
    config = _read_object(folder / "tokenizer_config.json")
    special_map = _read_object(folder / "special_tokens_map.json")
    generation = _read_object(folder / "generation_config.json")
    names = {}
    for name in NAMED_TOKENS:
        token = _content(config[name] if name in config else special_map.get(name))
        if token is not None:
            names[name] = token
    listed = generation.get("eos_token_id")
    return TokenizerSettings(
        names=names,
        tokenizer_class=_content(config.get("tokenizer_class")),
        add_bos_token=_flag(config.get("add_bos_token")),
        add_eos_token=_flag(config.get("add_eos_token")),
        added_tokens=_added_tokens(config.get("added_tokens_decoder")),
        model_max_length=_length_limit(config),
        listed_eos_ids=_ids(listed) if isinstance(listed, list) else (),
        fallback_eos_ids=_ids(listed) or _ids(_read_object(folder / "config.json").get("eos_token_id")),
    )


def length_limit(folder: Path) -> int | None:
    """The limit in tokens that `tokenizer_config.json` gives, None without one; reads no tokenizer."""
    return _length_limit(_read_object(folder / "tokenizer_config.json"))


def _length_limit(config: dict[str, Any]) -> int | None:
    length = config.get("model_max_length")
    return int(length) if isinstance(length, int | float) and 0 < length < UNLIMITED_LENGTH else None


def _parse_backend(file: Path, text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library knows no other class for a malformed file
        raise CheckpointError(f"{file}: not a tokenizer file: {error}") from error


def _complete_vocabulary(backend: Tokenizer, settings: TokenizerSettings) -> None:
    """Add tokens that only `tokenizer_config.json` knows, and flag the named ones as special."""
    for token_id, content, special in sorted(settings.added_tokens):
        if backend.token_to_id(content) is None and token_id == backend.get_vocab_size(with_added_tokens=True):
            backend.add_tokens([AddedToken(content, normalized=False, special=special)])
    flagged = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for content in settings.names.values():
        if content not in flagged and backend.token_to_id(content) is not None:
            backend.add_special_tokens([AddedToken(content, normalized=False, special=True)])


def _apply_llama_flags(backend: Tokenizer, settings: TokenizerSettings) -> None:
    """Surround texts as the flags of a Llama-class tokenizer ask; others are left as their file has them."""
    explicit = settings.add_bos_token is not None or settings.add_eos_token is not None
    if settings.tokenizer_class not in LLAMA_CLASSES or not explicit:
        return
    template: list[str] = ["$A:0"]
    tokens: list[tuple[str, int]] = []
    for wanted, name, place in ((settings.add_bos_token, "bos_token", 0), (settings.add_eos_token, "eos_token", 9)):
        content = settings.names.get(name)
        token_id = None if content is None else backend.token_to_id(content)
        if wanted and content is not None and token_id is not None:
            template.insert(place, f"{content}:0")
            tokens.append((content, token_id))
    backend.post_processor = TemplateProcessing(single=template, pair=[*template, "$B:1"], special_tokens=tokens)


def _surrounding_ids(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids the post-processor puts before and after every text."""
    encoding = backend.encode("a", add_special_tokens=True)
    added: list[int] = encoding.special_tokens_mask
    ids: list[int] = encoding.ids
    before = next((i for i, flag in enumerate(added) if not flag), len(ids))
    after = next((i for i, flag in enumerate(reversed(added)) if not flag), 0)
    return ids[:before], ids[len(ids) - after :]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"prompt text: character {error.start} is {text[error.start]!r}, half of a surrogate pair; "
            "expected valid Unicode, in which such halves come only in pairs"
        ) from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: got {type(value).__name__}, expected a JSON object")
    return value


def _content(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _ids(value: object) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(i for i in items if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31)


def _added_tokens(value: object) -> tuple[tuple[int, str, bool], ...]:
    if not isinstance(value, dict):
        return ()
    found = []
    for key, entry in value.items():
        content = _content(entry)
        if content is not None and key.isdecimal() and len(key) < 10:
            found.append((int(key), content, bool(isinstance(entry, dict) and entry.get("special"))))
    return tuple(found)
