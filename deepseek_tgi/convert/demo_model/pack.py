"""From documents to the token files that training reads: `train.bin`, `held-<kind>.bin`, `ids.json` and the tokenizer."""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections import Counter, defaultdict
from pathlib import Path

from tokenizers import Tokenizer

from deepseek_tgi.convert.demo_model.corpus import Document, make_prompts, own_documents, teacher_documents
from deepseek_tgi.convert.demo_model.shape import ModelShape
from deepseek_tgi.convert.demo_model.tokenizer import ASSISTANT, BOS, EOS, USER, render, save_tokenizer, train_tokenizer

_HELD_OUT = 0.01
_BATCH = 20_000


def pack(documents: list[Document], tokenizer: Tokenizer, out: Path, rng: random.Random) -> dict[str, int]:
    """Write the token files of `documents` in random order; returns tokens by kind, held-out ones apart."""
    rng.shuffle(documents)
    files: dict[str, array[int]] = defaultdict(lambda: array("H"))
    counts: Counter[str] = Counter()
    for start in range(0, len(documents), _BATCH):
        part = documents[start : start + _BATCH]
        rows = tokenizer.encode_batch_fast([render(document) for document in part], add_special_tokens=False)
        for document, row in zip(part, rows, strict=True):
            held = rng.random() < _HELD_OUT
            name = f"held-{document.kind}" if held else "train"
            files[name].extend(row.ids)
            counts[name if held else document.kind] += len(row.ids)
    out.mkdir(parents=True, exist_ok=True)
    for name, ids in files.items():
        (out / f"{name}.bin").write_bytes(ids.tobytes())
    marks = {name: tokenizer.token_to_id(mark) for name, mark in (("bos", BOS), ("eos", EOS), ("user", USER), ("assistant", ASSISTANT))}  # fmt: skip
    described = json.dumps({**marks, "vocab_size": tokenizer.get_vocab_size()}, indent=2)
    (out / "ids.json").write_text(described + "\n", encoding="utf-8")
    return dict(counts)


def main() -> None:
    """Build everything that training needs from the teacher's texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, help="folder that write_text filled")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, required=True, help="as write_text's --count")
    parser.add_argument("--seed", type=int, required=True, help="as write_text's --seed")
    parser.add_argument("--own", type=int, default=450_000, help="documents from our own tables and plots")
    parser.add_argument("--kept", type=int, default=6, help="of the teacher's answers, those kept a question")
    parser.add_argument("--copies", type=int, default=2, help="wordings of each of the teacher's answers")
    given = parser.parse_args()
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)

    prompts = make_prompts(given.prompts, given.seed)
    documents = teacher_documents(given.texts, prompts, given.kept, given.copies)
    say(f"{len(documents)} documents of the teacher")
    documents += own_documents(given.own, seed=100)
    say(f"{len(documents)} documents")
    rng = random.Random(given.seed)
    sample = rng.sample(documents, min(len(documents), 150_000))
    shape = ModelShape()
    tokenizer = train_tokenizer((render(document) for document in sample), shape.vocab_size)
    save_tokenizer(tokenizer, given.out, shape.max_position_embeddings)
    say("the tokenizer is trained")
    counts = pack(documents, tokenizer, given.out, rng)
    say(json.dumps(counts))


if __name__ == "__main__":
    main()
