"""A shard without a model: generate.v3 over a unix socket, tokens by script, and a sharp eye on what the router does.

It keeps which token history every slot holds, and records in `faults` each claim or address that cannot be right.
A prompt's text may carry its own script: see `Script.parse`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fake_script import Running, Script, Traits
from tiny_tokenizer import build_tokenizer

from deepseek_tgi.core import HEALTH_REQUEST_ID
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.pb.generate_pb2_grpc import TextGenerationServiceServicer, add_TextGenerationServiceServicer_to_server

EOS_TEXT = "</s>"


class FakeShard(TextGenerationServiceServicer):
    """The eight calls. `gate` holds steps back while it is cleared.

    `fail_next` maps a call to the error text of its next occurrence, after `skip_failures` that go well. `reported` are
    pairs of request id and count of tokens.
    """

    def __init__(self, path: Path, traits: Traits | None = None, ranks: int = 1, rank: int = 0) -> None:
        self.path = path
        self.traits = traits or Traits()
        self.ranks = ranks
        self.rank = rank
        self.calls: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        self.batches: dict[int, list[Running]] = {}
        self.slots: dict[int, int | None] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.fail_next: dict[str, str] = {}
        self.skip_failures = 0
        self.fail_status = grpc.StatusCode.INTERNAL
        self.hold_warmup: asyncio.Event | None = None
        self.reported: set[tuple[int, int]] = set()
        self.on_warmup: Callable[[pb.WarmupRequest], pb.WarmupResponse] | None = None
        self.prefill_budget = 1 << 30
        self.tokenizer = build_tokenizer()
        self.requests: list[pb.Request] = []
        self.warmup: pb.WarmupRequest | None = None
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        self._step_lock = asyncio.Lock()

    async def start(self) -> FakeShard:
        add_TextGenerationServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        self.gate.set()
        await self._server.stop(0)

    def count(self, call: str) -> int:
        """How often a call came."""
        return sum(name == call for name, _ in self.calls)

    @property
    def live(self) -> list[int]:
        """Ids of requests the shard holds, in order."""
        return [r.request.id for batch in self.batches.values() for r in batch]

    # --- calls ------------------------------------------------------------------------------------------------------

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        await self._enter("Info", None, context)
        t = self.traits
        return pb.InfoResponse(
            requires_padding=t.requires_padding,
            dtype="float32",
            device_type="cpu",
            speculate=0,
            support_chunking=t.support_chunking,
            use_prefix_caching=t.use_prefix_caching,
            attention_impl="fake",
            block_size=t.block_size,
        )

    async def ServiceDiscovery(self, request: Any, context: Any) -> pb.ServiceDiscoveryResponse:
        await self._enter("ServiceDiscovery", None, context)
        stem = str(self.path).removesuffix(f"-{self.rank}")
        return pb.ServiceDiscoveryResponse(urls=[f"unix://{stem}-{rank}" for rank in range(self.ranks)])

    async def Health(self, request: Any, context: Any) -> pb.HealthResponse:
        await self._enter("Health", None, context)
        return pb.HealthResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheResponse:
        await self._enter("ClearCache", request.id if request.HasField("id") else None, context)
        if request.HasField("id"):
            self.batches.pop(request.id, None)
        else:
            self.batches.clear()
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Any) -> pb.FilterBatchResponse:
        wanted = list(request.request_ids)
        await self._enter("FilterBatch", (request.batch_id, wanted), context)
        held = {r.request.id: r for r in self.batches.pop(request.batch_id)}
        if not wanted or not set(wanted) <= set(held):
            self.faults.append(f"filter to {wanted} of {sorted(held)}")
        self.batches[request.batch_id] = [held[i] for i in wanted]
        return pb.FilterBatchResponse(batch=self._cached(request.batch_id))

    async def Warmup(self, request: pb.WarmupRequest, context: Any) -> pb.WarmupResponse:
        await self._enter("Warmup", None, context)
        self.warmup = request
        self.prefill_budget = request.max_prefill_tokens
        if self.hold_warmup is not None:
            await self.hold_warmup.wait()
        if self.on_warmup is not None:
            return self.on_warmup(request)
        t = self.traits
        total = request.max_total_tokens if request.HasField("max_total_tokens") else t.max_total_tokens
        return pb.WarmupResponse(
            max_supported_total_tokens=t.num_blocks * t.block_size if t.reported_capacity else None,
            max_input_tokens=request.max_input_tokens if request.HasField("max_input_tokens") else total - 1,
            max_total_tokens=total,
        )

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        batch = request.batch
        if batch.id == HEALTH_REQUEST_ID:
            return await self._liveness(batch, context)
        cached = request.cached_batch.id if request.HasField("cached_batch") else None
        await self._enter("Prefill", (batch.id, [r.id for r in batch.requests], cached), context, [cached])
        new = [self._admit(r) for r in batch.requests]
        if cached is None:
            return self._finish(pb.PrefillResponse, batch.id, new, new)
        old = self.batches.pop(cached, None)
        if old is None:
            self.faults.append(f"Prefill names batch {cached}, which is not held")
            old = []
        return self._finish(pb.PrefillResponse, cached, old + new, old + new)

    async def Decode(self, request: pb.DecodeRequest, context: Any) -> pb.DecodeResponse:
        ids = [b.id for b in request.batches]
        await self._enter("Decode", ids, context, ids)
        running: list[Running] = []
        for batch_id in ids:
            if batch_id not in self.batches:
                self.faults.append(f"Decode names batch {batch_id}, which is not held")
                await context.abort(grpc.StatusCode.NOT_FOUND, f"batch {batch_id} is not held")
            running += self.batches.pop(batch_id)
        return self._finish(pb.DecodeResponse, ids[0], running, running)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _enter(self, call: str, detail: Any, context: Any, dropped: Sequence[int | None] = ()) -> None:
        self.calls.append((call, detail))
        if call in {"Prefill", "Decode"}:
            await self.gate.wait()
        if call in self.fail_next and self.skip_failures:
            self.skip_failures -= 1
        elif call in self.fail_next:
            for batch_id in dropped:
                if batch_id is not None:
                    self.batches.pop(batch_id, None)
            await context.abort(self.fail_status, self.fail_next.pop(call))

    async def _liveness(self, batch: pb.Batch, context: Any) -> pb.PrefillResponse:
        await self._enter("Liveness", None, context)
        expected = [0], [0], "liveness", 1
        request = batch.requests[0]
        if (list(request.blocks), list(request.slots), request.inputs, request.truncate) != expected:
            self.faults.append(f"liveness request {request}")
        tokens = pb.Tokens(ids=[1], logprobs=[0.0], texts=["x"], is_special=[False])
        text = pb.GeneratedText(text="x", generated_tokens=1, finish_reason=pb.FINISH_REASON_LENGTH)
        return pb.PrefillResponse(
            generations=[pb.Generation(request_id=HEALTH_REQUEST_ID, tokens=tokens, generated_text=text)]
        )

    def _admit(self, request: pb.Request) -> Running:
        self.requests.append(request)
        ids = self.tokenizer.encode(request.inputs, add_special_tokens=request.add_special_tokens).ids
        if len(ids) > request.truncate:
            keep = 1 if request.add_special_tokens else 0  # the tiny tokenizer puts one BOS in front
            ids = ids[:keep] + ids[len(ids) - request.truncate + keep :]
        needed = len(ids) + request.stopping_parameters.max_new_tokens - 1
        if not self.traits.requires_padding:
            self._check(request, ids, needed)
        chunk = request.chunk_len if request.HasField("chunk_len") else None
        return Running(request, ids, Script.parse(request.inputs), request.cache_len, chunk)

    def _check(self, request: pb.Request, ids: list[int], needed: int) -> None:
        slots = list(request.slots)
        size = self.traits.block_size
        if len(slots) != needed or 0 in request.blocks or len(set(slots)) != len(slots):
            self.faults.append(f"request {request.id}: {len(slots)} slots for {needed} tokens, blocks {request.blocks}")
        if [s // size for s in slots[::size]] != list(request.blocks):
            self.faults.append(f"request {request.id}: slots do not follow its blocks")
        if not request.cache_len < len(ids):
            self.faults.append(f"request {request.id}: cache_len {request.cache_len} of {len(ids)} tokens")
        for position, history in enumerate(_histories(ids)[: request.cache_len]):
            if self.slots.get(slots[position]) != history:
                self.faults.append(f"request {request.id}: claims position {position}, which is not stored")
                break
        mine = {request.slots[p] for p in range(request.cache_len, len(slots))}
        for other in (r for batch in self.batches.values() for r in batch if not r.ended):
            theirs = set(other.request.slots[: other.stored + 1]) | set(other.request.slots[len(other.ids) :])
            shared = mine & theirs
            rewritten = set(slots[len(ids) - 1 : len(ids)]) if request.cache_len == len(ids) - 1 else set()
            if shared - rewritten:
                self.faults.append(f"request {request.id} would overwrite {len(shared)} slots of {other.request.id}")

    def _finish(self, answer: Any, batch_id: int, running: list[Running], kept: list[Running]) -> Any:
        generations = [g for r in running if (g := self._advance(r)) is not None]
        if all(r.ended for r in kept):
            return answer(generations=generations, forward_ns=1000, decode_ns=500, total_ns=2000)
        self.batches[batch_id] = kept
        return answer(
            generations=generations,
            batch=self._cached(batch_id),
            forward_ns=1000,
            decode_ns=500,
            total_ns=2000,
            concat_ns=300 if answer is pb.DecodeResponse else None,
        )

    def _advance(self, r: Running) -> pb.Generation | None:
        if r.ended:
            return None
        end = len(r.ids)
        if r.prefilling:
            take = r.chunk if r.chunk is not None else end - r.stored
            r.chunk = None
            if take > self.prefill_budget + self.traits.block_size:
                self.faults.append(f"request {r.request.id}: {take} prompt tokens in a step of {self.prefill_budget}")
            stop = min(end, r.stored + take)
            self._store(r, r.stored, stop, r.ids)
            r.stored = stop
            if r.prefilling:
                r.chunk = min(self.prefill_budget, end - r.stored)
                return None
        else:
            self._store(r, r.stored, r.stored + 1, None)
            r.stored += 1
        if self.ranks > 1 and r.request.id % self.ranks != self.rank:
            r.made.append("")
            r.ended = len(r.made) >= r.request.stopping_parameters.max_new_tokens
            return None
        return self._generation(r)

    def _store(self, r: Running, start: int, stop: int, ids: list[int] | None) -> None:
        slots = r.request.slots[start:stop]
        histories = [None] * len(slots) if ids is None else _histories(ids)[start:stop]
        self.slots.update(zip(slots, histories, strict=False))

    def _generation(self, r: Running) -> pb.Generation:
        n = len(r.made)
        if r.script.lost_at == n + 1:
            return self._given_up(r)
        texts = r.script.texts
        eos = texts is not None and n >= len(texts)
        text = EOS_TEXT if eos else texts[n] if texts is not None else f"w{n} "
        r.made.append("" if eos else text)
        self.reported.add((r.request.id, n + 1))
        top = r.request.top_n_tokens
        generation = pb.Generation(
            request_id=r.request.id,
            tokens=pb.Tokens(ids=[100 + n], logprobs=[-0.41210938 - n], texts=[text], is_special=[eos]),
            top_tokens=[self._tops(n, top)] if top else [],
        )
        if n == 0 and r.request.prefill_logprobs:
            generation.prefill_tokens.CopyFrom(
                pb.Tokens(
                    ids=r.ids,
                    logprobs=[float("nan"), *([-1.5] * (len(r.ids) - 1))],
                    texts=[self.tokenizer.decode([i], skip_special_tokens=False) for i in r.ids],
                )
            )
        reason = self._reason(r, eos)
        if reason is not None:
            r.ended = True
            generation.generated_text.CopyFrom(
                pb.GeneratedText(
                    text="".join(r.made),
                    generated_tokens=n + 1,
                    finish_reason=reason,
                    seed=r.request.parameters.seed if r.request.parameters.do_sample else None,
                )
            )
        return generation

    def _given_up(self, r: Running) -> pb.Generation:
        """How a shard ends a request that it cannot go on with: an end token that has no logprob."""
        r.ended = True
        text, count = "".join(r.made), len(r.made) + 1
        self.reported.add((r.request.id, count))
        return pb.Generation(
            request_id=r.request.id,
            tokens=pb.Tokens(ids=[0], logprobs=[float("nan")], texts=[""], is_special=[True]),
            generated_text=pb.GeneratedText(
                text=text, generated_tokens=count, finish_reason=pb.FINISH_REASON_EOS_TOKEN
            ),
        )

    def _reason(self, r: Running, eos: bool) -> pb.FinishReason | None:
        stopping = r.request.stopping_parameters
        if len(r.made) >= stopping.max_new_tokens:
            return pb.FINISH_REASON_LENGTH
        if eos:
            return pb.FINISH_REASON_EOS_TOKEN
        if any("".join(r.made).endswith(stop) for stop in stopping.stop_sequences):
            return pb.FINISH_REASON_STOP_SEQUENCE
        return None

    @staticmethod
    def _tops(n: int, count: int) -> pb.Tokens:
        return pb.Tokens(
            ids=[100 + n + i for i in range(count)],
            logprobs=[-0.41210938 - n - i for i in range(count)],
            texts=[f"w{n + i} " for i in range(count)],
            is_special=[False] * count,
        )

    def _cached(self, batch_id: int) -> pb.CachedBatch:
        running = self.batches[batch_id]
        waiting = [r.chunk or 1 for r in running if not r.ended]
        return pb.CachedBatch(
            id=batch_id,
            request_ids=[r.request.id for r in running],
            size=len(running),
            max_tokens=len({b for r in running for b in r.request.blocks}) * self.traits.block_size,
            current_tokens=sum(waiting),
        )


def _histories(ids: list[int]) -> list[int]:
    """For each position, a number that stands for all ids up to it."""
    return list(accumulate(ids, lambda before, token: hash((before, token))))
