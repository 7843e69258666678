"""Real shards, one a rank, and the client that TGI's router is to them: every call to all ranks, one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ranks import unused_port
from shard_client import ShardClient, ShardProcess, serve_argv, serve_environment

from deepseek_tgi.pb import generate_pb2 as pb

R = TypeVar("R")


def spawn_ranks(model: Path, uds: Path, environment: Mapping[str, str], argv: Sequence[str] = ()) -> list[ShardProcess]:
    """Two ranks as the launcher starts them; none is waited for."""
    port = str(unused_port())
    return [
        ShardProcess.spawn(
            serve_argv(str(model), uds, ("--sharded", *argv)),
            serve_environment({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port, **environment}),
            uds,
        )
        for rank in range(2)
    ]


class RankClients(ShardClient):
    """Fans out and merges as the contract says (2.6), and holds every answer to line 22 of its checklist.

    Stands for a `ShardClient`: what drives one shard drives all ranks.
    """

    def __init__(self, clients: Sequence[ShardClient]) -> None:
        self.clients = list(clients)
        self.reported: list[list[int]] = [[] for _ in clients]
        self._pool = ThreadPoolExecutor(len(clients))

    def everywhere(self, call: Callable[[ShardClient], R]) -> list[R]:
        """Answers of all ranks, in rank order."""
        return list(self._pool.map(call, self.clients))

    def clear(self, batch_id: int | None = None) -> pb.ClearCacheResponse:
        """See `ShardClient`."""
        return self.everywhere(lambda client: client.clear(batch_id))[-1]

    def filter(self, batch_id: int, ids: Iterable[int]) -> pb.CachedBatch:
        """See `ShardClient`."""
        kept = list(ids)
        answers = self.everywhere(lambda client: client.filter(batch_id, kept))
        assert all(answer == answers[0] for answer in answers)
        return answers[-1]

    def prefill(
        self, requests: Sequence[pb.Request], batch_id: int, cached: pb.CachedBatch | None = None
    ) -> pb.PrefillResponse:
        """See `ShardClient`."""
        return self._merged(self.everywhere(lambda client: client.prefill(requests, batch_id, cached)))

    def decode(self, batches: Sequence[pb.CachedBatch]) -> pb.DecodeResponse:
        """See `ShardClient`."""
        return self._merged(self.everywhere(lambda client: client.decode(batches)))

    def warmup(
        self, max_prefill_tokens: int, max_input_tokens: int | None = None, max_total_tokens: int | None = None
    ) -> pb.WarmupResponse:
        """See `ShardClient`."""
        answers = self.everywhere(lambda c: c.warmup(max_prefill_tokens, max_input_tokens, max_total_tokens))
        assert all(answer == answers[0] for answer in answers), "all ranks hold the same number of blocks"
        return answers[-1]

    def close(self) -> None:
        """See `ShardClient`."""
        self.everywhere(lambda client: client.close())
        self._pool.shutdown()

    def _merged(self, answers: Sequence[Any]) -> Any:
        assert len({answer.HasField("batch") for answer in answers}) == 1, "all ranks or none have more to do"
        assert all(answer.batch == answers[0].batch for answer in answers), "same id, ids in order, size and counts"
        for rank, answer in enumerate(answers):
            own = [generation.request_id for generation in answer.generations]
            assert all(number % len(answers) == rank for number in own), "a request is its own rank's to report"
            self.reported[rank] += own
        merged = type(answers[0])()
        merged.CopyFrom(answers[-1])
        del merged.generations[:]
        for answer in answers:
            merged.generations.extend(answer.generations)
        return merged
