"""What the full-precision twin of the bundled model says, computed by transformers and kept as a small file.

`python tests/oracles/demo_twin.py TWIN_FOLDER` writes it again: for every position of a few texts the 64 largest
logits, their ids, and the log of the sum of all exponentials.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = Path(__file__).parent / "demo_twin.safetensors"
KEPT = 64
ASSISTANT_ID = 3
CHATS = (
    "What is the capital of France?",
    "Who are you?",
    "Why is the sky blue?",
    "How do I make tea?",
    "Name three animals.",
    "Tell me a short story about a cat.",
)
PLAIN = (
    "The capital of Italy is Rome.",
    "Once upon a time, there was a girl named Anna. One day, Anna went to the park.",
)


def texts() -> list[str]:
    """The texts, marks included."""
    chats = [f"<｜begin▁of▁sentence｜><｜User｜>{question}<｜Assistant｜>" for question in CHATS]
    return chats + [f"<｜begin▁of▁sentence｜>{text}" for text in PLAIN]


def first_learned(ids: torch.Tensor) -> int:
    """Where in `ids [T]` the first position stands whose prediction was trained: a user's words were not learned."""
    marks = (ids == ASSISTANT_ID).nonzero()
    return int(marks[0]) if len(marks) else 0


def read() -> dict[str, torch.Tensor]:
    """`ids.N [T]`, `top_ids.N [T, 64]`, `top.N [T, 64] float32`, `lse.N [T] float32` of text N."""
    return {name: t.float() if name.startswith("top.") else t for name, t in load_file(FILE).items()}


def write(folder: Path) -> None:
    """Ask the twin."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = {}
    for number, text in enumerate(texts()):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        if number < len(CHATS):
            with torch.no_grad():
                ids = model.generate(ids, max_new_tokens=24, do_sample=False)
        with torch.no_grad():
            logits = model(ids).logits[0]
        top = logits.topk(KEPT)
        tensors[f"ids.{number}"] = ids[0].to(torch.int32)
        tensors[f"top_ids.{number}"] = top.indices.to(torch.int16)
        tensors[f"top.{number}"] = top.values.to(torch.float16)
        tensors[f"lse.{number}"] = logits.logsumexp(-1)
    save_file(tensors, FILE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
