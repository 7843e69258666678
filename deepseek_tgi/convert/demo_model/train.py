"""Trains the bundled model for a given number of seconds on one device.

The learning rate falls linearly to nothing over the time given. In the last quarter the weights that will be packed are
seen as packed (`fake_quantise`), and sequences are as long as the model's limit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from deepseek_tgi.convert.demo_model import checkpoint
from deepseek_tgi.convert.demo_model.model import DemoModel
from deepseek_tgi.convert.demo_model.muon import Muon
from deepseek_tgi.convert.demo_model.shape import ModelShape

Say = Callable[[str], None]
HeadLoss = Callable[[DemoModel, torch.Tensor, torch.Tensor], torch.Tensor]

_WARM_UP_STEPS = 100
_BALANCE_RATE = 1e-3
_STEPS_A_LINE = 50
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train. `batch_tokens` is tokens a step; `rounded_from` the share of the time after which weights are
    seen as packed; `marks` are the ids that open a
    user's and the assistant's side of a chat; `clock` gives seconds."""

    seconds: float
    batch_tokens: int = 131_072
    length: int = 1024
    peak_rate: float = 4e-3
    rounded_from: float = 0.75
    marks: tuple[int, int] = (2, 3)
    compiled: bool = True
    clock: Callable[[], float] = time.monotonic


def targets_of(ids: torch.Tensor, user_id: int, assistant_id: int) -> torch.Tensor:
    """What each position should predict, `[B, T]` of `ids [B, T + 1]`; words of a user are not to be learned."""
    at = torch.arange(ids.shape[1], device=ids.device)
    asked = torch.where(ids == user_id, at, -1).cummax(1).values
    answered = torch.where(ids == assistant_id, at, -1).cummax(1).values
    return torch.where(asked > answered, _IGNORED, ids)[:, 1:]


def head_loss(model: DemoModel, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean loss of the stream `x [B, T, H]` over the targets that count."""
    logits = model.head(x).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), ignore_index=_IGNORED)


def loss_of(
    model: DemoModel, ids: torch.Tensor, marks: tuple[int, int], rounded: bool, head: HeadLoss = head_loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the tokens to learn, and the experts' loads. `marks` are the ids of user and assistant."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        x, loads = model.stream(ids[:, :-1], rounded)
        loss = head(model, x, targets_of(ids, *marks))
    return loss, loads


def batches(tokens: torch.Tensor, rows: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Random windows `[rows, length + 1] int64` of `tokens [N] int16`, each part once before any part again."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(length + 1, device=tokens.device)
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        count = (tokens.shape[0] - offset - 1) // length
        order = torch.randperm(count, generator=generator).to(tokens.device) * length + offset
        for start in order[: count // rows * rows].split(rows):
            yield tokens[start.unsqueeze(1) + steps].to(torch.int64)


def train(model: DemoModel, tokens: torch.Tensor, plan: Plan, say: Say, before_rounding: Callable[[], None]) -> None:
    """Train `model` in place on `tokens [N] int16`, both on one device; `before_rounding` is called once."""
    matrices = [p for n, p in model.named_parameters() if p.dim() >= 2 and n != "embedding" and "router" not in n]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=plan.peak_rate, betas=(0.9, 0.95), weight_decay=0.0)
    head: HeadLoss = head_loss
    if plan.compiled:
        # Layer by layer: all layers of a kind share one compilation, which takes seconds where the whole takes a minute.
        head = torch.compile(head_loss, dynamic=False)
        for layer in model.layers:
            layer.compile(dynamic=False)
    begin = plan.clock()
    step, seen, rounded, fraction = 0, 0, False, 0.0
    length = plan.length
    source = batches(tokens, plan.batch_tokens // length, length, seed=1)
    while fraction < 1:
        if not rounded and fraction >= plan.rounded_from:
            rounded, length = True, model.shape.max_position_embeddings
            source = batches(tokens, max(1, plan.batch_tokens // length), length, seed=2)
            before_rounding()
            say(f"step {step}: weights are rounded from here on, length {length}")
        ids = next(source)
        loss, loads = loss_of(model, ids, plan.marks, rounded, head)
        loss.backward()
        rate = plan.peak_rate * min(1.0, (step + 1) / _WARM_UP_STEPS) * max(1 - fraction, 0.01)
        _update(model, muon, adam, rate)
        model.balance(loads, _BALANCE_RATE if fraction < 0.95 else 0.0)
        step, seen = step + 1, seen + ids.shape[0] * length
        if step % _STEPS_A_LINE == 0:
            shown = float(loss.detach())
            spread = float((loads.max(1).values / loads.mean(1)).max())
            spent = plan.clock() - begin
            say(f"step {step} loss {shown:.3f} tokens {seen / 1e6:.1f}M {seen / spent / 1e3:.0f}k/s load {spread:.2f}")
        fraction = (plan.clock() - begin) / plan.seconds
    say(f"trained {step} steps, {seen} tokens, {plan.clock() - begin:.0f} s")


def _update(model: DemoModel, muon: Muon, adam: torch.optim.Optimizer, rate: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    muon.step(rate)
    for group in adam.param_groups:
        group["lr"] = rate
    adam.step()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def held_out_loss(model: DemoModel, tokens: torch.Tensor, marks: tuple[int, int], rounded: bool) -> float:
    """Mean loss over at most 256 windows of 512 of `tokens [N] int16`."""
    rows = tokens[: tokens.shape[0] // 513 * 513].view(-1, 513)[:256].to(torch.int64)
    parts = [loss_of(model, part, marks, rounded)[0] * part.shape[0] for part in rows.split(64)]
    return float(torch.stack(parts).sum() / rows.shape[0])


def main() -> None:
    """Train from a folder of token files; leaves a checkpoint folder and a report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with train.bin, held-*.bin and ids.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--peak-rate", type=float, default=4e-3)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    ids = json.loads((given.data / "ids.json").read_text(encoding="utf-8"))
    plan = Plan(
        seconds=given.seconds,
        batch_tokens=given.batch_tokens,
        length=given.length,
        peak_rate=given.peak_rate,
        marks=(ids["user"], ids["assistant"]),
        compiled=not given.no_compile,
    )
    given.out.mkdir(parents=True, exist_ok=True)
    log = (given.out / "train.log").open("a", encoding="utf-8")

    def say(line: str) -> None:
        print(line, flush=True)
        print(line, file=log, flush=True)

    shape = ModelShape(vocab_size=ids["vocab_size"], num_hidden_layers=given.layers)
    model = DemoModel(shape).to(device)
    tokens = read_tokens(given.data / "train.bin").to(device)
    say(f"{sum(p.numel() for p in model.parameters())} parameters, {tokens.shape[0]} tokens, {plan}")

    def save(folder: Path) -> None:
        checkpoint.save(model, folder, ids["bos"], ids["eos"])

    train(model, tokens, plan, say, lambda: save(given.out / "before-rounding"))
    save(given.out)
    for path in sorted(given.data.glob("held-*.bin")):
        held = read_tokens(path).to(device)
        dense, packed = (held_out_loss(model, held, plan.marks, rounded) for rounded in (False, True))
        say(f"{path.stem}: loss {dense:.4f}, packed {packed:.4f}")


def read_tokens(path: Path) -> torch.Tensor:
    """The ids of a file of 16-bit numbers."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.int16)


if __name__ == "__main__":
    main()
