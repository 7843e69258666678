"""Lines 10 and 22 of the contract's checklist, and the rest of a batch's life, on two real ranks of one real model."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from rank_clients import RankClients, spawn_ranks
from router_model import Ask, BlockBook, RouterModel
from shard_bench import MAX_INPUT_TOKENS, MAX_PREFILL_TOKENS, MAX_TOTAL_TOKENS
from shard_client import ShardClient, ShardProcess
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from builders import TinyCheckpoint
    from oracles.greedy import GreedyOracle

OWN = {"OMP_NUM_THREADS": "1", "DEEPSEEK_TGI_KV_CACHE_DTYPE": "float32", "DEEPSEEK_TGI_KV_MEMORY": "2MiB"}


class Ranks:
    """Two shards after the router's start-up talk."""

    def __init__(self, shards: list[ShardProcess], model: Path) -> None:
        self.shards = shards
        self.clients = RankClients([ShardClient(shard.socket) for shard in shards])
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.clients.clear()
        self.limits = self.clients.warmup(MAX_PREFILL_TOKENS, MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS)
        self.block_size = self.clients.everywhere(lambda client: client.info())[-1].block_size

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def router(self) -> RouterModel:
        book = BlockBook(self.limits.max_supported_total_tokens // self.block_size, self.block_size)
        return RouterModel(self.clients, book, self.encode)


def open_ranks(model: Path, folder: Path) -> tuple[list[ShardProcess], Ranks]:
    shards = spawn_ranks(model, folder / "shard", OWN, ("--dtype", "float32"))
    try:
        for shard in shards:
            shard.wait_ready()
        return shards, Ranks(shards, model)
    except BaseException:
        for shard in shards:
            shard.stop()
        raise


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint_awq: TinyCheckpoint) -> Iterator[Ranks]:
    shards, ranks = open_ranks(tiny_checkpoint_awq.path, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.clients.close()
    codes = [shard.stop() for shard in shards]
    assert codes == [0, 0], "both leave in peace"


@pytest.fixture
def ranks(opened: Ranks) -> Iterator[Ranks]:
    opened.clients.clear()
    yield opened
    dead = [shard for shard in opened.shards if shard.process.poll() is not None]
    assert not dead, "\n".join(shard.words() for shard in dead)


def test_line_10_each_rank_has_its_socket_and_both_list_both(ranks: Ranks) -> None:
    urls = [f"unix://{shard.socket}" for shard in ranks.shards]
    assert [url.rpartition("-")[2] for url in urls] == ["0", "1"]
    assert ranks.clients.everywhere(lambda client: client.discover()) == [urls, urls]


def test_line_22_every_request_is_reported_by_one_rank_and_both_return_the_same_batch(
    ranks: Ranks, oracle: GreedyOracle
) -> None:
    router = ranks.router()
    asks = [Ask(f"request number {number} of a few", 6 + number) for number in range(5)]
    router.admit(*asks[:3])
    router.step()
    router.admit(*asks[3:], Ask("drawn", 9, parameters={"do_sample": True, "seed": 5, "temperature": 0.8}))
    router.finish()
    for number, ask in enumerate(asks):
        assert router.outcomes[number].ids == oracle.greedy(ranks.encode(ask.text), ask.max_new)
    assert [set(numbers) for numbers in ranks.clients.reported] == [{0, 2, 4}, {1, 3, 5}]
    assert router.outcomes[5].final is not None
    assert router.outcomes[5].final.seed == 5


def test_random_traffic_with_chunks_and_cancels_keeps_both_ranks_in_step(ranks: Ranks, oracle: GreedyOracle) -> None:
    choose = random.Random(3)
    router = ranks.router()
    texts = ["short", "a text of some more words " * 3, "long " * 50]
    asked: dict[int, Ask] = {}
    for number in range(16):
        asked[number] = Ask(choose.choice(texts) + str(number), choose.randint(1, 9), chunk_len=None)
        if len(ranks.encode(asked[number].text)) > 40:
            asked[number].chunk_len = choose.choice([16, 33])
        router.admit(asked[number])
        if router.live and choose.random() < 0.3:
            gone = choose.choice(sorted(router.live))
            router.cancel(gone)
            del asked[gone]
        for _ in range(choose.randint(0, 4)):
            if router.batch is not None:
                router.step()
    router.finish()
    for number in list(asked)[::3]:
        ask = asked[number]
        assert router.outcomes[number].ids == oracle.greedy(ranks.encode(ask.text), ask.max_new), number


def test_a_health_prefill_may_reach_one_rank_before_a_decode_and_the_other_after(
    ranks: Ranks, oracle: GreedyOracle
) -> None:
    router = ranks.router()
    router.admit(Ask("meanwhile", 24))
    with ThreadPoolExecutor(3) as pool:
        for turn in range(20):
            first, last = ranks.clients.clients[turn % 2], ranks.clients.clients[1 - turn % 2]
            early = pool.submit(first.health_prefill)
            decode = pool.submit(router.step)
            late = pool.submit(last.health_prefill)
            decode.result(60)
            reports = sorted(len(answer.result(60).generations) for answer in (early, late))
            assert reports == [0, 1], "one rank reports that both are alive"
    router.finish()
    assert router.outcomes[0].ids == oracle.greedy(ranks.encode("meanwhile"), 24)


def test_a_wrong_call_fails_on_both_ranks_and_the_next_one_works(ranks: Ranks, oracle: GreedyOracle) -> None:
    router = ranks.router()
    router.admit(Ask("still here", 5))
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(client.decode, []) for client in ranks.clients.clients]
        errors = [answer.exception(60) for answer in answers]
    assert [e.code() for e in errors if isinstance(e, grpc.RpcError)] == [grpc.StatusCode.INVALID_ARGUMENT] * 2
    router.finish()
    assert router.outcomes[0].ids == oracle.greedy(ranks.encode("still here"), 5)


def test_when_a_rank_is_killed_the_other_says_which_and_leaves(
    tmp_path: Path, tiny_checkpoint_awq: TinyCheckpoint
) -> None:
    shards, ranks = open_ranks(tiny_checkpoint_awq.path, tmp_path)
    try:
        router = ranks.router()
        router.admit(Ask("the last words", 9))
        assert router.batch is not None
        shards[1].process.send_signal(signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            ranks.clients.clients[0].decode([router.batch])
        words = f"rank 0: rank 1 is gone (process {shards[1].process.pid})"
        assert caught.value.details().startswith(words)
        assert shards[0].process.wait(20) == 1
        assert words in shards[0].words()
    finally:
        ranks.clients.close()
        for shard in shards:
            shard.stop()
