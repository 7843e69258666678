"""llama.cpp behind the benchmark's line protocol; runs in the peer's own environment and imports nothing of ours.

One JSON object a line on stdin, one answer a line on stdout; the operations are those of `workers.Worker`. Greedy
sampling is done by llama.cpp itself, so that Python adds one ctypes call a token and no more.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp as lc

MAX_CONTEXT = 16 * 1024
MAX_BATCH = 2048
QUIET = lc.llama_log_callback(lambda _level, _text, _data: None)
"""llama.cpp reports every tensor otherwise. Kept for the process's life: C holds a pointer to it."""


class Llama:
    """One model and one context with room for several sequences."""

    def __init__(self, path: str, threads: int, streams: int) -> None:
        lc.llama_backend_init()
        self.model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = MAX_CONTEXT, MAX_BATCH, 512
        params.n_seq_max, params.kv_unified = streams, True
        params.n_threads = params.n_threads_batch = threads
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocab = lc.llama_model_get_vocab(self.model)
        self.batch = lc.llama_batch_init(MAX_BATCH, 0, 1)
        self.greedy = lc.llama_sampler_init_greedy()

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)

    def feed(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Decode `(token, position, sequence, wants logits)` entries in one call."""
        self.batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
            self.batch.logits[i] = wanted
        status = lc.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode answered {status}")

    def sample(self, row: int) -> int:
        return int(lc.llama_sampler_sample(self.greedy, self.context, row))

    def prompt(self, ids: list[int], sequence: int = 0) -> int:
        """Prefill one sequence; the first new token."""
        last = len(ids) - 1
        self.feed([(token, at, sequence, at == last) for at, token in enumerate(ids)])
        return self.sample(last)

    def text(self, ids: list[int]) -> str:
        return b"".join(self.piece(token) for token in ids).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        room = ctypes.create_string_buffer(256)
        length = lc.llama_token_to_piece(self.vocab, token, room, len(room), 0, True)
        return room.raw[:length]


def generate(llama: Llama, request: dict[str, Any]) -> dict[str, Any]:
    """Prefill `ids`, then `tokens` greedy steps of one sequence: both times, and the text."""
    ids, tokens = request["ids"], request["tokens"]
    llama.clear()
    started = time.perf_counter()
    made = [llama.prompt(ids)]
    prefilled = time.perf_counter()
    for step in range(tokens):
        llama.feed([(made[-1], len(ids) + step, 0, True)])
        made.append(llama.sample(0))
    done = time.perf_counter()
    return {"prefill_s": prefilled - started, "decode_s": done - prefilled, "tokens": tokens, "text": llama.text(made)}


def batched(llama: Llama, request: dict[str, Any]) -> dict[str, Any]:
    """All `prompts` prefilled in one call, then `tokens` steps of all together.

    The best case of a parallel server: nobody waits, nothing is sent anywhere.
    """
    prompts, tokens = request["prompts"], request["tokens"]
    llama.clear()
    started = time.perf_counter()
    entries = [(token, at, s, at == len(ids) - 1) for s, ids in enumerate(prompts) for at, token in enumerate(ids)]
    llama.feed(entries)
    last = [llama.sample(row) for row, entry in enumerate(entries) if entry[3]]
    prefilled = time.perf_counter()
    for step in range(tokens - 1):
        llama.feed([(last[s], len(ids) + step, s, True) for s, ids in enumerate(prompts)])
        last = [llama.sample(s) for s in range(len(prompts))]
    done = time.perf_counter()
    return {"total_s": done - started, "decode_s": done - prefilled, "tokens": tokens * len(prompts)}


def requantise(source: str, target: str) -> None:
    """Write `target` as Q4_K_M from a GGUF that is quantised already, as `llama-quantize --allow-requantize` does."""
    params = lc.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = lc.LLAMA_FTYPE_MOSTLY_Q4_K_M, True
    if lc.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
        raise SystemExit(f"llama.cpp cannot requantise {source}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requantise-to")
    arguments = parser.parse_args()
    lc.llama_log_set(QUIET, ctypes.c_void_p(0))
    if arguments.requantise_to:
        requantise(arguments.gguf, arguments.requantise_to)
        return
    llama = Llama(arguments.gguf, arguments.threads, arguments.streams)
    system = lc.llama_print_system_info().decode()
    weights = int(lc.llama_model_size(llama.model))
    # llama.cpp writes to stdout by itself at times: answers go to the original one, everything else to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    hello = {"version": f"llama-cpp-python {lc.__version__}", "system": system, "weight_bytes": weights}
    print(json.dumps(hello), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        run = {"generate": generate, "batched": batched}[request["op"]]
        print(json.dumps(run(llama, request)), file=answers)


if __name__ == "__main__":
    main()
