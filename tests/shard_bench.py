"""A running shard with everything a conformance test needs around it: client, window, limits, and the tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from backend_window import WINDOW
from router_model import BlockBook, RouterModel
from scripted_texts import Script, read_script
from shard_client import ShardClient, ShardProcess, serve_argv, serve_environment
from tokenizers import Tokenizer

from deepseek_tgi.pb import generate_pb2 as pb

MAX_PREFILL_TOKENS = 64
MAX_INPUT_TOKENS = 480
MAX_TOTAL_TOKENS = 512


@dataclass
class Bench:
    """One warmed-up shard. `folder` is the window into its backend; `model` the checkpoint it serves."""

    shard: ShardProcess
    client: ShardClient
    folder: Path
    model: Path
    info: pb.InfoResponse
    limits: pb.WarmupResponse

    @classmethod
    def open(
        cls,
        folder: Path,
        model: Path,
        backend: str,
        environment: Mapping[str, str],
        extra_argv: Sequence[str] = (),
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> Bench:
        """Start, wait for the socket, and talk as the router does at its own start."""
        own = {"DEEPSEEK_TGI_BACKEND": backend, WINDOW: str(folder), "OMP_NUM_THREADS": "1"}
        uds = folder / "shard"
        shard = ShardProcess.spawn(
            serve_argv(str(model), uds, extra_argv), serve_environment(own | dict(environment)), uds
        )
        try:
            shard.wait_ready()
            client = ShardClient(shard.socket)
            assert client.discover() == [f"unix://{shard.socket}"]
            client.clear()
            info = client.info()
            limits = client.warmup(max_prefill_tokens, MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS)
        except BaseException:
            shard.stop()
            raise
        return cls(shard, client, folder, model, info, limits)

    @cached_property
    def script(self) -> Script:
        """What the scripted backend will say; only for benches that serve it."""
        return read_script(self.model)

    @property
    def num_blocks(self) -> int:
        """Blocks the router's allocator would own, block 0 among them."""
        return int(self.limits.max_supported_total_tokens // self.info.block_size)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, read here with the library and not with our code."""
        return Tokenizer.from_file(str(self.model / "tokenizer.json"))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Prompt ids, as the router counts them."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def router(self, seed: int = 0, first_id: int = 0) -> RouterModel:
        """A batching task of its own over all blocks, ids from `first_id`."""
        return RouterModel(self.client, BlockBook(self.num_blocks, self.info.block_size, seed), self.encode, first_id)

    def order(self, **order: Any) -> None:
        """Tell the backend to sleep or to fail at its next step."""
        temporary = self.folder / "control.new"
        temporary.write_text(json.dumps(order))
        temporary.rename(self.folder / "control.json")

    def withdraw(self) -> None:
        """Take an unobeyed order back."""
        (self.folder / "control.json").unlink(missing_ok=True)

    def mark(self) -> int:
        """A place in the log of steps, for `steps`."""
        path = self.folder / "steps.jsonl"
        return os.path.getsize(path) if path.exists() else 0

    def steps(self, since: int = 0) -> list[dict[str, Any]]:
        """What the backend was asked since a mark, one record a forward."""
        with (self.folder / "steps.jsonl").open() as file:
            file.seek(since)
            return [json.loads(line) for line in file]

    def fed(self, since: int) -> list[tuple[int, int, int]]:
        """(id, position, slot) of every token fed since a mark."""
        return [row for s in self.steps(since) for row in zip(s["ids"], s["positions"], s["slots"], strict=True)]

    def stored(self, since: int = 0) -> dict[int, str]:
        """Digest of what the cache holds, by slot, as of the last write since a mark."""
        held: dict[int, str] = {}
        for step in self.steps(since):
            held |= {int(slot): digest for slot, digest in step["stored"].items()}
        return held

    def close(self) -> None:
        """Stop the shard."""
        self.client.close()
        self.shard.stop()
