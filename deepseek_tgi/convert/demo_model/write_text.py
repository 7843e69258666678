"""Has the teacher answer prompts for some seconds and keeps what it wrote, as rows of `(prompt number, text)`."""

from __future__ import annotations

import argparse
import json
import lzma
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from tokenizers import Tokenizer

from deepseek_tgi.convert.demo_model.prompts import Prompt, make_prompts
from deepseek_tgi.convert.gguf_file import GgufFile
from deepseek_tgi.convert.gguf_tokenizer import read_tokenizer

_END = "<|im_end|>"
_UNWANTED = set("*#_{}<>[]\\|~^=`@")
"""Marks of code and markup, which the teacher is fond of and plain prose has no use for."""
_LONGEST_PROMPT = 256


def chat(prompt: Prompt) -> str:
    """The teacher's own chat format, up to where its answer goes on."""
    turns = f"<|im_start|>system\n{prompt.system}{_END}\n"
    for question, answer in prompt.before:
        turns += f"<|im_start|>user\n{question}{_END}\n<|im_start|>assistant\n{answer}{_END}\n"
    return f"{turns}<|im_start|>user\n{prompt.question}{_END}\n<|im_start|>assistant\n{prompt.opening}"


def teacher_tokenizer(gguf: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    described, _ = read_tokenizer(GgufFile(gguf))
    tokenizer: Tokenizer = Tokenizer.from_str(json.dumps(described))
    return tokenizer


def plain_ids(tokenizer: Tokenizer) -> torch.Tensor:
    """Ids `[A] int64` of plain English text, and the one that ends an answer."""
    spelled = tokenizer.get_vocab()
    texts = tokenizer.decode_batch([[i] for i in range(tokenizer.get_vocab_size())], skip_special_tokens=True)
    kept = [
        index
        for index, text in enumerate(texts)
        if text and all(" " <= c <= "~" or c == "\n" for c in text) and not _UNWANTED & set(text)
    ]
    return torch.tensor(sorted({*kept, spelled[_END]}))


def encode(tokenizer: Tokenizer, prompts: list[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt ids `[N, P] int32` and lengths `[N] int32`. A prompt that is too long loses its end."""
    rows = [e.ids[:_LONGEST_PROMPT] for e in tokenizer.encode_batch_fast([chat(p) for p in prompts])]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    ids = torch.zeros((len(rows), _LONGEST_PROMPT), dtype=torch.int32)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return ids, lengths


def _pack(gguf: Path, out: Path, raw: Path, files: int, number: int) -> int:
    """Write every `files`-th text of `raw`, from `number` on, as one packed file; its size unpacked."""
    tokenizer = teacher_tokenizer(gguf)
    texts, starts, ends = torch.load(raw, mmap=True)
    rows = [index for index in range(number, len(starts), files) if ends[index] > starts[index]]
    ids = [texts[index, int(starts[index]) : int(ends[index])].tolist() for index in rows]
    written = tokenizer.decode_batch(ids, skip_special_tokens=True)
    lines = [json.dumps([index, text]) + "\n" for index, text in zip(rows, written, strict=True)]
    with lzma.open(out / f"text-{number}.jsonl.xz", "wt", preset=1, encoding="ascii") as file:
        file.writelines(lines)
    return sum(len(line) for line in lines)


def main() -> None:
    """Write for `--seconds`; numbered text files are left in the folder `out`."""
    from deepseek_tgi.convert.demo_model import teacher

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--count", type=int, default=100_000, help="prompts")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=448, help="tokens of a prompt and its answer")
    parser.add_argument("--files", type=int, default=6)
    given = parser.parse_args()
    begin = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin:7.1f} s  {line}", flush=True)

    tokenizer = teacher_tokenizer(given.gguf)
    allowed = plain_ids(tokenizer)
    prompts = make_prompts(given.count, given.seed)
    ids, lengths = encode(tokenizer, prompts)
    say(f"{len(prompts)} prompts, {len(allowed)} ids, mean length {lengths.float().mean():.1f}")
    weights = teacher.read_weights(given.gguf, allowed, "cuda")
    say("weights are loaded")
    heat = torch.tensor([p.temperature for p in prompts])
    room = torch.tensor([p.room for p in prompts], dtype=torch.int32)
    asked = teacher.Prompts(ids.cuda(), lengths.cuda(), (lengths + room).clamp(max=given.limit).cuda(), heat.cuda())
    end_id = tokenizer.token_to_id(_END)
    assert end_id is not None, "the tokenizer of the small real model has its own end mark"
    writer = teacher.Writer(weights, asked, given.slots, given.limit, end_id)
    torch.manual_seed(given.seed)
    steps = [0]

    def on_pause(taken: int, spent: float) -> None:
        steps[0] += 200
        say(f"{taken} prompts taken, {steps[0] * given.slots / max(spent, 1e-9) / 1e3:.0f}k tokens/s")

    writer.run(given.seconds, on_pause)
    ends = writer.ends[: given.count].cpu()
    texts = writer.texts[: given.count].cpu()
    say(f"{int((ends > lengths).sum())} texts, {int((ends - lengths).clamp(min=0).sum())} tokens")
    given.out.mkdir(parents=True, exist_ok=True)
    raw = given.out / "raw.pt"
    torch.save((texts.to(torch.uint16), lengths, ends), raw)
    work = partial(_pack, given.gguf, given.out, raw, given.files)
    with ProcessPoolExecutor(given.files, mp_context=get_context("spawn")) as pool:
        sizes = list(pool.map(work, range(given.files)))
    raw.unlink()
    say(f"{sum(sizes)} bytes of text in {given.files} files")


if __name__ == "__main__":
    main()
