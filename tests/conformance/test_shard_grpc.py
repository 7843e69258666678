"""The eight calls one by one: lines 11 to 21 and 23 of the contract's checklist."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from otlp_collector import Collector
from router_model import Ask
from shard_bench import MAX_PREFILL_TOKENS, Bench
from shard_client import HEALTH_ID, ShardClient, attempt, warmup_request

from deepseek_tgi.pb import generate_pb2 as pb

RESPONSE_LIMIT_BYTES = 4 * 2**20
"""What the router's client decodes at most."""


def refused(bench: Bench, *batches: pb.CachedBatch) -> grpc.RpcError:
    """Decode these batches, which must fail cleanly."""
    _, error = attempt(lambda: bench.client.decode(batches))
    assert error is not None, f"{batches} was decoded"
    return error


def test_line_11_info_is_constant_and_usable(shard: Bench) -> None:
    first = shard.client.info()
    assert first.block_size >= 1
    assert not first.HasField("window_size")
    assert not first.requires_padding
    router = shard.router()
    router.run(Ask("some work in between"))
    assert shard.client.info() == first == shard.info


def test_line_12_clear_cache_answers_for_any_id_and_clears_only_what_is_named(shard: Bench) -> None:
    one, two = shard.router(first_id=10), shard.router(first_id=20)
    two.book.take(16 * 4)  # the two tasks must not share blocks
    one.admit(Ask("first", 20))
    two.admit(Ask("second", 20))
    shard.client.clear(12345678901234567890)
    one.step()
    two.step()
    assert one.batch is not None
    assert two.batch is not None
    shard.client.clear(one.batch.id)
    refused(shard, one.batch)
    two.step()
    shard.client.clear()
    refused(shard, two.batch)
    shard.client.clear()


def test_line_12_batch_id_zero_is_an_id_and_not_an_absent_one(scripted: Bench) -> None:
    second = ShardClient(scripted.shard.socket)
    for _ in range(200):
        router = scripted.router()
        router.admit(Ask("zero", 3))
        assert router.batch is not None
        assert router.batch.id == 0
        second.health()
        second.clear(7)
        router.step()
        assert router.batch is not None
        second.clear(0)
        refused(scripted, router.batch)
    second.close()


@pytest.mark.parametrize("kept", [[0], [3], [0, 1, 2, 3], [2, 0], [3, 1, 0]], ids=str)
def test_line_13_filter_keeps_exactly_these_in_this_order(shard: Bench, kept: list[int]) -> None:
    router = shard.router()
    router.admit(*[Ask(f"request number {i}", 6) for i in range(4)])
    assert router.batch is not None
    assert list(router.batch.request_ids) == [0, 1, 2, 3]
    answer = shard.client.filter(router.batch.id, kept)
    assert list(answer.request_ids) == kept
    assert answer.size == answer.current_tokens == len(kept)
    response = shard.client.decode([answer])
    assert sorted(g.request_id for g in response.generations) == sorted(kept)


def test_line_13_filter_of_an_unknown_batch_is_an_error_that_names_it(shard: Bench) -> None:
    with pytest.raises(grpc.RpcError, match="424242"):
        shard.client.filter(424242, [1])


@pytest.fixture(scope="module")
def own_client(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Bench]:
    """The real backend by its own name, measuring its own memory; warm-ups are its only work."""
    own = {"DEEPSEEK_TGI_KV_CACHE_DTYPE": "float32"}
    bench = Bench.open(tmp_path_factory.mktemp("warm"), tiny_model_dir, "deepseek-quant", own)
    yield bench
    bench.close()


@pytest.mark.parametrize("limits", [(480, 512), (1, 2), (100, 300)], ids=str)
def test_line_14_warmup_echoes_given_limits(own_client: Bench, limits: tuple[int, int]) -> None:
    answer = own_client.client.warmup(128, *limits)
    assert (answer.max_input_tokens, answer.max_total_tokens) == limits
    assert answer.max_supported_total_tokens >= max(128, limits[1])


@pytest.mark.parametrize("budget", [16, 128, 500])
def test_line_15_warmup_chooses_limits_the_router_accepts(own_client: Bench, budget: int) -> None:
    answer = own_client.client.warmup(budget)
    info = own_client.info
    assert answer.HasField("max_supported_total_tokens")
    assert 0 < answer.max_input_tokens < answer.max_total_tokens <= answer.max_supported_total_tokens
    assert budget <= answer.max_supported_total_tokens
    usable = (answer.max_supported_total_tokens // info.block_size - 1) * info.block_size
    assert answer.max_total_tokens + info.speculate - 1 <= usable
    assert info.support_chunking or answer.max_input_tokens <= budget


def test_line_44_measured_capacity_fits_the_memory_of_the_machine(own_client: Bench) -> None:
    bytes_per_token = 2 * 2 * (32 + 32) * 4  # layers, KV heads, key and value width, float32
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total = int(fields["MemTotal"].split()[0]) * 1024
    promised = own_client.limits.max_supported_total_tokens * bytes_per_token
    assert 2**20 < promised < total
    assert own_client.shard.rss_bytes() < 2 * 2**30, "pages must not be touched before they are used"


def test_line_16_warmup_takes_the_strangest_batch_the_router_sends(own_client: Bench) -> None:
    request = warmup_request(100, 30, 200)
    assert [r.truncate for r in request.batch.requests] == [30, 30, 30, 10]
    assert {r.id for r in request.batch.requests} == {0}
    assert own_client.client.warmup(100, 30, 200).max_total_tokens == 200


def test_line_16_the_prefill_budget_may_be_used_to_the_next_block(shard: Bench) -> None:
    size = shard.info.block_size
    assert MAX_PREFILL_TOKENS % size == 0, "the bench's budget is a multiple already; take one that is not"
    uneven = MAX_PREFILL_TOKENS - 5
    shard.client.warmup(uneven, 480, 512)
    router = shard.router()
    response = router.admit(Ask("x" * (MAX_PREFILL_TOKENS - 1), 2))  # BOS makes it full
    assert len(response.generations) == 1
    shard.client.warmup(MAX_PREFILL_TOKENS, 480, 512)


def test_line_17_health_prefill_is_one_token_and_no_batch_beside_a_running_batch(shard: Bench) -> None:
    router = shard.router()
    router.admit(Ask("running meanwhile", 6))
    mark = shard.mark()
    answer = shard.client.health_prefill()
    (generation,) = answer.generations
    assert generation.request_id == HEALTH_ID
    assert len(generation.tokens.ids) == 1
    assert generation.generated_text.generated_tokens == 1
    assert generation.generated_text.finish_reason == pb.FINISH_REASON_LENGTH
    assert not answer.HasField("batch")
    assert {slot for _, _, slot in shard.fed(mark)} == {0}
    router.finish()
    assert router.outcomes[0].ids == shard.router().run(Ask("running meanwhile", 6))[0].ids


def test_line_18_health_and_info_answer_during_a_long_forward(shard: Bench) -> None:
    second = ShardClient(shard.shard.socket)
    second.health()
    router = shard.router()
    shard.order(sleep_s=3.0)
    mark = shard.mark()
    worker = threading.Thread(target=router.admit, args=(Ask("slow"),))
    worker.start()
    slowest, polls = 0.0, 0
    while worker.is_alive():
        started = time.monotonic()
        second.health(timeout=10)
        second.info()
        slowest = max(slowest, time.monotonic() - started)
        polls += 1
        time.sleep(0.1)
    worker.join()
    second.close()
    assert len(shard.steps(mark)) == 1
    assert polls >= 3, f"{polls} answers in three seconds: they waited for the forward"
    assert slowest < 1.0


@pytest.mark.parametrize("error", ["RuntimeError", "ValueError", "MemoryError", "AssertionError", "OutOfMemoryError"])
@pytest.mark.parametrize("call", ["prefill", "join", "decode"])
def test_line_19_a_failed_step_drops_its_batches_and_nothing_else(shard: Bench, call: str, error: str) -> None:
    expected = shard.router().run(Ask("after the storm", 5))[0].ids
    router = shard.router(first_id=5)
    if call != "prefill":
        router.admit(Ask("running", 20))
    running = router.batch
    shard.order(error=error, message=f"injected {error} for the test")
    _, failure = attempt(router.step if call == "decode" else lambda: router.admit(Ask("unlucky", 5)))
    assert failure is not None
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert f"injected {error} for the test" in (failure.details() or "")
    assert running is None or running.id == 5
    refused(shard, pb.CachedBatch(id=5))
    refused(shard, pb.CachedBatch(id=6))
    assert shard.router().run(Ask("after the storm", 5))[0].ids == expected
    shard.client.health()


def _too_few_slots(request: pb.Request) -> None:
    del request.slots[-3:]


def _slots_beyond_the_pool(request: pb.Request) -> None:
    request.slots[1] = 2**31 + 5


def _blocks_beyond_the_pool(request: pb.Request) -> None:
    request.blocks[0] = 2**31 + 5


def _unset_parameters(request: pb.Request) -> None:
    request.ClearField("parameters")


def _no_new_tokens(request: pb.Request) -> None:
    request.stopping_parameters.max_new_tokens = 0


def _claim_beyond_the_prompt(request: pb.Request) -> None:
    request.cache_len = 4000


def _bad_temperature(request: pb.Request) -> None:
    request.parameters.temperature = float("nan")


@pytest.mark.parametrize(
    "spoil",
    [
        _too_few_slots,
        _slots_beyond_the_pool,
        _blocks_beyond_the_pool,
        _unset_parameters,
        _no_new_tokens,
        _claim_beyond_the_prompt,
        _bad_temperature,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_line_19_a_request_that_makes_no_sense_is_refused_or_served_but_never_harms(
    shard: Bench, spoil: object
) -> None:
    expected = shard.router().run(Ask("a neighbour", 6))[0].ids
    router = shard.router(first_id=100)
    request = router.build(Ask("what is wrong with me", 6))
    spoil(request)  # type: ignore[operator]
    answer, error = attempt(lambda: shard.client.prefill([request], 9))
    assert error is not None or all(len(g.tokens.ids) for g in answer.generations)
    shard.client.clear(9)
    assert shard.router().run(Ask("a neighbour", 6))[0].ids == expected


@pytest.mark.parametrize("spoil", [_too_few_slots, _slots_beyond_the_pool, _blocks_beyond_the_pool])
def test_line_19_slots_that_cannot_hold_the_request_are_refused_with_the_numbers(shard: Bench, spoil: object) -> None:
    request = shard.router().build(Ask("what is wrong with me", 6))
    spoil(request)  # type: ignore[operator]
    with pytest.raises(grpc.RpcError, match=r"[0-9]+.*(slot|block)|(slot|block).*[0-9]+"):
        shard.client.prefill([request], 9)


def test_line_19_a_bad_request_beside_running_ones_ends_alone(scripted: Bench) -> None:
    router = scripted.router()
    router.admit(Ask("somebody runs", 12))
    grammar = {"grammar": "(unclosed", "grammar_type": pb.GRAMMAR_TYPE_REGEX}
    _, error = attempt(lambda: router.admit(Ask("bad", 4, parameters=grammar), Ask("comes along", 9)))
    assert error is None, "a Prefill that fails takes the running requests with it"
    router.finish()
    assert router.outcomes[0].ids == scripted.script.greedy(scripted.encode("somebody runs"), 12)
    assert router.outcomes[2].ids == scripted.script.greedy(scripted.encode("comes along"), 9)
    assert router.outcomes[1].final is not None, "it must end, or its client waits for good"


def test_line_20_a_request_of_50_mb_is_accepted(shard: Bench) -> None:
    router = shard.router()
    request = router.build(Ask("small text, large baggage", 3))
    request.input_chunks.chunks.append(pb.InputChunk(image=pb.Image(data=bytes(50_000_000), mimetype="image/jpeg")))
    answer = shard.client.prefill([request], 1)
    assert [g.request_id for g in answer.generations] == [0]
    shard.client.clear(1)


def test_line_20_an_answer_stays_below_4_mib_or_fails_with_a_reason(plain: Bench) -> None:
    router = plain.router()
    asks = [Ask("a", 3, top_n=plain.script.vocab_size) for _ in range(1300)]
    answer, error = attempt(lambda: router.admit(*asks))
    if error is None:
        assert answer.ByteSize() <= RESPONSE_LIMIT_BYTES
    else:
        assert re.search("MiB|bytes", error.details() or ""), error.details()
    plain.client.clear()
    assert plain.router().run(Ask("plain words", 9, ignore_eos=False))[0].reason == "EOS_TOKEN"


def test_line_21_decode_of_nothing_or_of_the_unknown_is_a_clean_error(shard: Bench) -> None:
    refused(shard)
    assert "987654321" in (refused(shard, pb.CachedBatch(id=987654321)).details() or "")
    router = shard.router()
    router.admit(Ask("still there", 4))
    router.finish()


TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_line_23_a_span_with_the_callers_parent_is_exported(plain: Bench, collector: Collector) -> None:
    metadata = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", ""))
    client = ShardClient(plain.shard.socket, metadata)
    client.prefill([plain.router().build(Ask("plain words", 1))], 0)
    client.close()
    span = collector.wait_for(lambda s: s.trace_id.hex() == TRACE_ID and s.name.endswith("/Prefill"))
    assert span.name.strip("/") == "generate.v3.TextGenerationService/Prefill"
    assert span.parent_span_id.hex() == PARENT_ID
    assert span.kind == span.SPAN_KIND_SERVER
    attributes = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
    assert attributes["rpc.system"] == "grpc"
    assert attributes["rpc.method"] == "Prefill"


def test_line_23_without_an_endpoint_trace_metadata_is_harmless(shard: Bench) -> None:
    client = ShardClient(shard.shard.socket, (("traceparent", "00-zz-broken-01"), ("tracestate", "")))
    client.prefill([shard.router().build(Ask("traced", 1))], 0)
    client.close()


def test_all_log_lines_are_records_the_launcher_reads(shard: Bench) -> None:
    assert all(len(line) <= 4096 for line in list(shard.shard.stdout))
    texts = [record["text"] for record in shard.shard.log()]
    assert not [t for t in texts if "liveness" in t or "neighbour" in t], "prompts do not belong into logs"


def test_socket_path_is_the_stem_and_the_rank(shard: Bench) -> None:
    assert shard.client.discover() == [f"unix://{shard.shard.socket}"]
    assert Path(f"{shard.shard.uds_path}-0").is_socket()
