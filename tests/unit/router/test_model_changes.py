"""Plans of a change and what remains of each when a part of it fails, in front of shards that do as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_control import BAD, SHORT, FakeControl
from fake_script import Traits
from fake_shard import FakeShard
from tiny_tokenizer import write_tokenizer

from deepseek_tgi.errors import NotReadyError, OverloadedError
from deepseek_tgi.pb import control_pb2_grpc
from deepseek_tgi.probes.state import State
from deepseek_tgi.router.assembly import Router, assemble
from deepseek_tgi.router.change import Change, Wish
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import from_sources
from deepseek_tgi.router.errors import ModelChangeError
from deepseek_tgi.router.infer import Generated
from deepseek_tgi.router.model_changes import ModelChanges
from deepseek_tgi.router.model_files import load_model_files
from deepseek_tgi.router.requests import GenerateRequest, Parameters
from deepseek_tgi.router.startup import introduce
from deepseek_tgi.router.traffic import Traffic

OTHER = Wish("other")
BLOCKS = 300


@dataclass
class Bench:
    """A router without its HTTP, in front of a shard whose control is played."""

    router: Router
    shard: FakeShard
    control: FakeControl

    @property
    def changes(self) -> ModelChanges:
        assert self.router.changes is not None
        return self.router.changes

    def state(self) -> State:
        return self.router.owner.state

    @property
    def serving(self) -> tuple[str | None, int | None]:
        model = self.router.models.open
        return (None, None) if model is None else (model.name, model.generation)

    async def ask(self, new_tokens: int = 3) -> Generated:
        """One request, as a route makes it."""
        model = await self.router.models.admitted()
        with model.traffic.request():
            return await model.state.infer.generate(GenerateRequest("hello", Parameters(max_new_tokens=new_tokens)))

    async def asking(self, new_tokens: int = 3) -> asyncio.Task[Generated]:
        """The same on its way."""
        task = asyncio.create_task(self.ask(new_tokens))
        await asyncio.sleep(0.02)
        return task


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    shard = FakeShard(tmp_path / "shard-0", Traits(num_blocks=BLOCKS))
    control = FakeControl(model, 16)
    control_pb2_grpc.add_ModelControlServicer_to_server(control, shard._server)
    await shard.start()
    argv = ["--tokenizer-name", str(model), "--master-shard-uds-path", str(shard.path), "--served-model-id", "first"]
    argv += ["--max-concurrent-requests", "4"]
    limits = {"DEEPSEEK_TGI_HOLD_TIMEOUT": "0.5", "DEEPSEEK_TGI_DRAIN_TIMEOUT": "0.4"}
    config = from_sources(argv, limits)
    client = await ShardClient.connect(str(shard.path))
    router = assemble(config, client, await introduce(client, config), load_model_files(config), generation=1)
    batching = asyncio.create_task(router.models.run())
    yield Bench(router, shard, control)
    assert router.changes is not None
    await router.changes.close()
    assert not batching.done(), "the batching loop ended"
    batching.cancel()
    await asyncio.wait({batching})
    router.close()
    await client.close()
    await shard.stop()


async def refused(bench: Bench, wish: Wish) -> str:
    with pytest.raises(ModelChangeError) as caught:
        await bench.changes.load(wish)
    assert bench.changes.history[-1].state == "failed"
    assert bench.changes.history[-1].error == str(caught.value)
    return str(caught.value)


async def at_stage(bench: Bench, stage: str) -> Change:
    """The change that goes on, once it is there."""
    while bench.changes.running is None or bench.changes.running.stage != stage:
        await asyncio.sleep(0.005)
    return bench.changes.running


async def settled(bench: Bench) -> None:
    """The old model's retirement is over."""
    while bench.changes._loads.leaving:
        await asyncio.sleep(0.005)


async def test_with_room_the_model_changes_at_one_instant_and_the_old_one_goes(bench: Bench) -> None:
    change = await bench.changes.load(OTHER)
    await settled(bench)
    assert (change.plan, change.state, change.pause_s) == ("beside", "done", 0.0)
    assert bench.control.calls == [("load", "other"), ("publish", 2), ("unload", 1)]
    assert bench.serving == ("other", 2)
    assert bench.state() is State.READY
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_what_runs_ends_on_the_old_model_before_that_is_unloaded(bench: Bench) -> None:
    bench.shard.gate.clear()
    running = await bench.asking()
    await bench.changes.load(OTHER)
    await asyncio.sleep(0.05)
    assert bench.serving == ("other", 2)
    assert "unload" not in bench.control.names
    bench.shard.gate.set()
    assert (await running).ending.generated_tokens == 3
    await settled(bench)
    assert bench.control.names[-1] == "unload"


async def test_short_of_memory_the_cache_is_shrunk_to_what_a_longest_request_needs(bench: Bench) -> None:
    bench.control.outcomes = [SHORT]
    blocks = bench.router.scheduler.blocks
    assert blocks is not None
    change = await bench.changes.load(OTHER)
    await settled(bench)
    assert change.plan == "shrink"
    assert bench.control.names == ["load", "discard", "load", "publish", "unload"]
    given_back = bench.control.calls[1][1]
    assert len(given_back) == len(set(given_back)) == BLOCKS - 1 - (512 // 16 + 1)
    assert 0 not in given_back
    assert blocks.available_blocks == 512 // 16 + 1
    blocks.check_integrity()


async def test_short_of_memory_still_new_requests_wait_while_the_old_model_leaves_first(bench: Bench) -> None:
    bench.control.outcomes = [SHORT, SHORT]
    bench.control.gate.clear()
    bench.shard.gate.clear()
    running = await bench.asking()
    loading = asyncio.create_task(bench.changes.load(OTHER))
    await asyncio.sleep(0.05)
    bench.control.gate.set()
    while bench.router.models.open is not None:
        await asyncio.sleep(0.005)
    assert bench.state() is State.LOADING
    waiting = await bench.asking()
    assert not waiting.done()
    bench.shard.gate.set()
    change = await loading
    assert (await running).ending.generated_tokens == (await waiting).ending.generated_tokens == 3
    assert change.plan == "drain"
    assert change.pause_s > 0
    assert bench.control.names == ["load", "discard", "load", "discard", "unload", "load", "publish"]
    assert bench.control.calls[3] == ("discard", [])
    assert bench.serving == ("other", 4)


async def test_a_load_that_fails_after_the_drain_brings_the_old_model_back(bench: Bench) -> None:
    bench.control.outcomes = [BAD]
    told = await refused(bench, Wish("other", plan="drain"))
    assert told == "model.safetensors: cut short; first was loaded again and serves"
    assert bench.serving == ("first", 3)
    assert bench.state() is State.READY
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_if_nothing_can_be_loaded_any_more_that_is_said_and_requests_are_refused(bench: Bench) -> None:
    bench.control.outcomes = [BAD, BAD]
    told = await refused(bench, Wish("other", plan="drain"))
    assert told.endswith("first could not be loaded again: model.safetensors: cut short; none serves")
    assert bench.serving == (None, None)
    assert bench.state() is State.UNLOADED
    with pytest.raises(NotReadyError, match="No model is loaded"):
        await bench.ask()
    assert (await bench.changes.load(OTHER)).plan == "empty"
    assert bench.state() is State.READY
    assert (await bench.ask()).ending.generated_tokens == 3


@pytest.mark.parametrize(
    ("wish", "outcomes", "calls"),
    [
        (OTHER, [BAD], ["load"]),
        (Wish("other", plan="beside"), [SHORT], ["load"]),
        (OTHER, [SHORT, BAD], ["load", "discard", "load", "discard"]),
    ],
    ids=["bad", "no room and nothing else wished", "shrunk, then bad"],
)
async def test_a_failed_load_leaves_everything_as_it_was(
    bench: Bench, wish: Wish, outcomes: list[Any], calls: list[str]
) -> None:
    bench.control.outcomes = outcomes
    await refused(bench, wish)
    blocks = bench.router.scheduler.blocks
    assert blocks is not None
    assert bench.control.names == calls
    assert bench.serving == ("first", 1)
    assert bench.state() is State.READY
    assert blocks.available_blocks == BLOCKS - 1
    blocks.check_integrity()
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_what_does_not_end_in_time_keeps_the_old_model(bench: Bench) -> None:
    bench.shard.gate.clear()
    running = await bench.asking()
    changing = asyncio.create_task(refused(bench, Wish("other", plan="drain")))
    await asyncio.sleep(0.1)
    waiting = await bench.asking()
    assert await changing == "1 requests of first still run after 0.4 s; first serves on"
    bench.shard.gate.set()
    assert (await running).ending.generated_tokens == (await waiting).ending.generated_tokens == 3
    assert bench.control.names == []
    assert bench.state() is State.READY


@pytest.mark.parametrize("verb", ["drain", "unload", "sleep"])
async def test_a_model_does_not_go_while_one_before_it_still_finishes(bench: Bench, verb: str) -> None:
    """Its shard would then have no model to serve, and refuse the steps of the requests that were taken."""
    bench.shard.gate.clear()
    running = await bench.asking()
    second = (await bench.changes.load(OTHER)).generation
    work = {
        "drain": lambda: bench.changes.load(Wish("third", plan="drain")),
        "unload": bench.changes.unload,
        "sleep": lambda: bench.changes.sleep(False),
    }[verb]
    changing = asyncio.create_task(work())
    await asyncio.sleep(0.1)
    assert bench.control.names == ["load", "publish"], "something was taken away from under a request that runs"
    bench.shard.gate.set()
    assert (await running).ending.generated_tokens == 3
    assert (await changing).state == "done"
    assert bench.control.calls[2] == ("unload", 1)
    assert bench.control.names[3] == {"drain": "unload", "unload": "unload", "sleep": "sleep"}[verb]
    assert verb == "sleep" or bench.control.calls[3] == ("unload", second)


async def test_a_model_before_that_does_not_finish_in_time_keeps_the_one_that_serves(bench: Bench) -> None:
    bench.shard.gate.clear()
    running = await bench.asking()
    await bench.changes.load(OTHER)
    text = await refused(bench, Wish("third", plan="drain"))
    assert text == "1 requests of first still run after 0.4 s; other serves on"
    assert bench.serving[0] == "other"
    assert bench.state() is State.READY
    bench.shard.gate.set()
    assert (await running).ending.generated_tokens == 3


async def test_who_gives_no_time_to_drain_still_drains_what_is_idle() -> None:
    traffic = Traffic()
    assert await traffic.idle_within(0.0)
    with traffic.request():
        assert not await traffic.idle_within(0.0)
    assert await traffic.idle_within(0.0)


async def test_requests_wait_only_so_long_and_only_so_many(bench: Bench) -> None:
    bench.control.gate.clear()
    changing = asyncio.create_task(bench.changes.load(Wish("other", plan="drain")))
    await asyncio.sleep(0.05)
    waiting = [await bench.asking() for _ in range(4)]
    with pytest.raises(OverloadedError):
        await bench.ask()
    for task in waiting:
        with pytest.raises(NotReadyError, match=r"still being changed after 0\.5 s"):
            await task
    bench.control.gate.set()
    assert (await changing).state == "done"
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_a_model_that_cannot_be_published_is_unloaded_and_the_old_one_serves_on(bench: Bench) -> None:
    bench.control.failing = {"publish"}
    assert "publish broke" in await refused(bench, OTHER)
    assert bench.control.names == ["load", "publish", "unload"]
    assert bench.serving == ("first", 1)
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_a_cache_that_cannot_be_shrunk_keeps_its_blocks(bench: Bench) -> None:
    blocks = bench.router.scheduler.blocks
    assert blocks is not None
    before = blocks.available_blocks
    bench.control.outcomes, bench.control.failing = [SHORT], {"discard"}
    assert "discard broke" in await refused(bench, OTHER)
    assert blocks.available_blocks == before
    assert bench.serving == ("first", 1)


async def test_an_old_model_that_will_not_go_leaves_nobody_waiting(bench: Bench) -> None:
    """It has been given up by then: it is loaded anew, and who waited gets it."""
    bench.control.failing = {"unload"}
    changing = asyncio.create_task(refused(bench, Wish("other", plan="drain")))
    waiting = await bench.asking()
    assert "unload broke" in await changing
    assert (await waiting).ending.generated_tokens == 3
    assert bench.serving[0] == "first"
    assert bench.state() is State.READY


@pytest.mark.parametrize("plan", ["beside", "drain"])
async def test_a_load_that_breaks_as_nobody_foresaw_has_failed_like_any_other(bench: Bench, plan: str) -> None:
    """Here the stream of stages ends well and brings no model."""
    bench.control.failing = {"load"}
    waiting = None
    changing = asyncio.create_task(refused(bench, Wish("other", plan=plan)))
    if plan == "drain":
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(bench.ask())
    assert "other: loading broke: " in await changing
    if waiting is None:
        assert bench.serving == ("first", 1)
    else:  # the old model breaks in the same way
        with pytest.raises(NotReadyError, match="No model is loaded"):
            await waiting
        assert bench.state() is State.UNLOADED


async def test_who_waits_through_two_changes_waits_no_longer_than_through_one(bench: Bench) -> None:
    models, loop = bench.router.models, asyncio.get_running_loop()
    models.hold()
    asked_at = loop.time()
    waiting = asyncio.create_task(models.admitted())
    for _ in range(3):
        await asyncio.sleep(0.2)
        models.resume()
        models.hold()
    with pytest.raises(NotReadyError, match=r"still being changed after 0\.5 s"):
        await waiting
    assert loop.time() - asked_at < 1.0
    models.resume()


async def test_a_refused_request_leaves_nothing_behind(bench: Bench) -> None:
    """An error that is kept and raised again collects the frames, and with them the bodies, of all who met it."""
    await bench.changes.unload()
    depths = set()
    for _ in range(3):
        with pytest.raises(NotReadyError) as caught:
            await bench.router.models.admitted()
        depths.add(len(caught.traceback))
    assert len(depths) == 1


async def test_one_change_at_a_time(bench: Bench) -> None:
    bench.control.gate.clear()
    first = asyncio.create_task(bench.changes.load(OTHER))
    await at_stage(bench, "loading")
    for other in (bench.changes.load(Wish("third")), bench.changes.unload(), bench.changes.sleep(False)):
        told = r"refused: load other \(loading 50 %\) is under way; one at a time, ask again when it is over"
        with pytest.raises(ModelChangeError, match=told):
            await other
    bench.control.gate.set()
    assert (await first).state == "done"


async def test_a_load_may_come_while_the_model_before_the_last_still_leaves(bench: Bench) -> None:
    bench.control.unload_gate.clear()
    for name in ("other", "third"):
        assert (await bench.changes.load(Wish(name))).state == "done"
        assert bench.serving[0] == name
    bench.control.unload_gate.set()
    await settled(bench)
    assert bench.control.names.count("unload") == 2


async def test_a_load_at_any_instant_of_another_is_done_or_refused_with_the_reason(bench: Bench) -> None:
    came_late = 0
    for instant in range(200):
        names = f"first-{instant}", f"second-{instant}"
        first = bench.changes.start(bench.changes.load(Wish(names[0])))
        if instant < 60:
            for _ in range(instant):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(0.0005 * (instant - 60))
        served = bench.serving[0] == names[0]
        came_late += served
        second = (await asyncio.gather(bench.changes.load(Wish(names[1])), return_exceptions=True))[0]
        assert (await first).state == "done"
        if isinstance(second, BaseException):
            assert not served, "what serves already stands in nobody's way"
            assert f"refused: load {names[0]}" in str(second)
            assert "ask again when it is over" in str(second)
            await bench.changes.load(Wish(names[1]))
        assert bench.serving[0] == names[1]
        if came_late == 10:
            break
    assert came_late, "no load came after another had ended"


async def test_what_is_served_already_is_known_by_revision_wishes_and_files(bench: Bench) -> None:
    async def served(**wish: Any) -> bool:
        return await bench.changes.serves(Wish("other", **wish))

    assert await bench.changes.serves(Wish("first"))
    assert not await served()
    await bench.changes.load(Wish("other", revision="v1"))
    assert await served()
    assert await served(revision="v1")
    assert not await served(revision="v2")
    assert not await served(quantize="awq"), "what is to be checked is checked"
    assert not await served(manifest_sha256="0" * 64)
    assert not await served(plan="drain")
    (bench.control.folder / "config.json").write_text("{}")
    assert not await served()
    await bench.changes.load(Wish("other"))
    assert await served()
    await bench.changes.sleep(False)
    assert not await served()


async def test_a_tokenizer_that_changes_under_a_load_is_noticed(bench: Bench) -> None:
    bench.control.tokenizer_sha256 = "0" * 64
    assert "tokenizer.json changed" in await refused(bench, OTHER)
    assert bench.control.names == ["load", "unload"]
    assert bench.serving == ("first", 1)


async def test_sleeping_refuses_and_a_waking_model_lets_requests_wait(bench: Bench) -> None:
    await bench.changes.sleep(True)
    assert bench.state() is State.SLEEPING
    with pytest.raises(NotReadyError, match="first sleeps"):
        await bench.ask()
    bench.control.outcomes, before = [BAD], len(bench.control.calls)
    with pytest.raises(ModelChangeError):
        await bench.changes.wake()
    assert bench.serving == (None, None)
    assert len(bench.control.calls) == before + 1
    bench.control.gate.clear()
    waking = asyncio.create_task(bench.changes.wake())
    await asyncio.sleep(0.02)
    waiting = await bench.asking()
    bench.control.gate.set()
    await waking
    assert (await waiting).ending.generated_tokens == 3
    assert bench.state() is State.READY


async def test_what_sleeps_is_not_put_to_sleep_again(bench: Bench) -> None:
    """The shards refuse that, and a model that is taken for awake then would serve nobody."""
    await bench.changes.sleep(False)
    with pytest.raises(ModelChangeError, match="first sleeps already"):
        await bench.changes.sleep(False)
    assert bench.control.names == ["sleep"]
    assert bench.state() is State.SLEEPING
    with pytest.raises(NotReadyError, match="first sleeps"):
        await bench.ask()
    await bench.changes.wake()
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_who_still_waits_for_a_model_that_is_given_up_is_told(bench: Bench) -> None:
    bench.shard.gate.clear()
    running = await bench.asking()
    model = bench.router.models.current
    assert model is not None
    await bench.changes._loads.gone(model)
    bench.shard.gate.set()
    with pytest.raises(NotReadyError, match="first was given up"):
        await asyncio.wait_for(running, 5)


async def test_a_sleeper_that_is_unloaded_is_named_in_the_history(bench: Bench) -> None:
    await bench.changes.sleep(False)
    await bench.changes.unload()
    assert [(each.kind, each.model, each.state) for each in bench.changes.history[-2:]] == [
        ("sleep", "first", "done"),
        ("unload", "first", "done"),
    ]
    assert bench.state() is State.UNLOADED


async def test_a_load_that_fails_leaves_the_sleeper_to_be_woken(bench: Bench) -> None:
    await bench.changes.sleep(False)
    bench.control.outcomes = [BAD]
    assert "cut short" in await refused(bench, OTHER)
    assert bench.state() is State.SLEEPING
    with pytest.raises(NotReadyError, match="first sleeps"):
        await bench.ask()
    await bench.changes.wake()
    assert bench.serving == ("first", 1)
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_a_model_that_was_loaded_beside_a_sleeper_takes_its_place(bench: Bench) -> None:
    await bench.changes.sleep(False)
    change = await bench.changes.load(OTHER)
    await settled(bench)
    assert change.plan == "beside"
    assert bench.control.names == ["sleep", "load", "publish", "unload"]
    assert bench.control.calls[-1] == ("unload", 1)
    assert bench.serving == ("other", change.generation)
    assert bench.state() is State.READY
    with pytest.raises(ModelChangeError, match="no model sleeps"):
        await bench.changes.wake()
    assert bench.serving == ("other", change.generation)


@pytest.mark.parametrize("plan", ["auto", "drain"])
async def test_short_of_memory_the_sleeper_goes_first(bench: Bench, plan: str) -> None:
    await bench.changes.sleep(False)
    bench.control.outcomes = [SHORT] if plan == "auto" else []
    change = await bench.changes.load(Wish("other", plan=plan))
    assert change.plan == "empty"
    assert [name for name in bench.control.names if name != "sleep"] == (
        ["load"] * (plan == "auto") + ["unload", "load", "publish"]
    )
    assert bench.serving == ("other", change.generation)
    assert bench.state() is State.READY


async def test_a_model_that_cannot_sleep_serves_on(bench: Bench) -> None:
    bench.control.outcomes = [SHORT]
    with pytest.raises(ModelChangeError, match="10 bytes are needed"):
        await bench.changes.sleep(False)
    assert bench.control.names == ["sleep"]
    assert bench.state() is State.READY
    assert (await bench.ask()).ending.generated_tokens == 3


async def test_a_change_can_be_followed_from_any_moment_to_its_end(bench: Bench) -> None:
    bench.control.gate.clear()
    task = bench.changes.start(bench.changes.load(OTHER))
    change = await at_stage(bench, "loading")
    seen: list[tuple[str, str]] = []

    async def follow(change: Change) -> None:
        async for step in bench.changes.follow(change):
            seen.append((step.stage, step.state))

    followers = [asyncio.create_task(follow(change)) for _ in range(2)]
    await asyncio.sleep(0.02)
    bench.control.gate.set()
    await task
    await asyncio.gather(*followers)
    assert seen[0] == ("loading", "running")
    assert seen[-1][1] == "done"
