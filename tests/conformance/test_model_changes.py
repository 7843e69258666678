"""Several models in one shard: who answers which call, what runs on, and what is refused with everything as it was.

The oracle is `transformers` on the weights of each model: a token that the other model would have given is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from builders import TinyCheckpoint, tiny_checkpoint
from oracles.greedy import GreedyOracle
from router_model import Ask, BlockBook, RouterModel
from shard_bench import Bench
from shard_client import ShardClient
from shard_control import LIMITS, ControlClient

from deepseek_tgi.launcher.models import ModelsError, load_behind_tgi
from deepseek_tgi.pb import control_pb2

PROMPTS = ("the cat sat on the mat", "hello world", "in the end there is only the sea", "a")
Spoil = Callable[[Path], None]


@dataclass
class Shelf:
    """Two models whose answers differ, and a shard that was started with the first."""

    bench: Bench
    control: ControlClient
    models: dict[str, TinyCheckpoint]
    oracles: dict[str, GreedyOracle]

    def generation(self) -> int:
        """One that was never asked for."""
        return int(self.control.status().newest) + 1

    def said_by(self, name: str, text: str, count: int) -> list[int]:
        """What `transformers` says with the weights of a model."""
        return self.oracles[name].greedy(self.bench.encode(text), count)

    def held(self) -> dict[int, str]:
        return {model.generation: model.state for model in self.control.status().models}

    def published(self) -> int:
        return int(self.control.status().published)

    def router(self, generation: int | None = None, first_id: int = 0) -> RouterModel:
        """A batching task; with a generation, as our router has one for each model."""
        metadata = () if generation is None else (("x-deepseek-generation", str(generation)),)
        client = ShardClient(self.bench.shard.socket, metadata)
        book = BlockBook(self.bench.num_blocks, self.bench.info.block_size)
        return RouterModel(client, book, self.bench.encode, first_id)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, stranger: dict[str, str]) -> Iterator[Shelf]:
    folder = tmp_path_factory.mktemp("shelf")
    models = {
        name: tiny_checkpoint(folder / name, "llama", "awq-gemm", seed=seed) for name, seed in (("one", 1), ("two", 2))
    }
    own = {"DEEPSEEK_TGI_KV_CACHE_DTYPE": "float32", "DEEPSEEK_TGI_KV_MEMORY": "2MiB"}
    bench = Bench.open(folder, models["one"].path, "deepseek-quant", stranger | own, ("--dtype", "float32"))
    control = ControlClient(bench.shard.socket)
    yield Shelf(bench, control, models, {name: GreedyOracle(model.reference()) for name, model in models.items()})
    control.close()
    bench.close()


@pytest.fixture
def fresh(shelf: Shelf) -> Iterator[Shelf]:
    """The shelf with the first model's weights published and nothing else held, before and after."""
    yield shelf
    shelf.bench.client.clear()
    current = shelf.published()
    if shelf.control.status().models[0].model_id != str(shelf.models["one"].path) or len(shelf.held()) > 1:
        generation = shelf.generation()
        shelf.control.load(shelf.models["one"].path, generation)
        shelf.control.publish(generation)
        for old in shelf.held():
            if old != generation:
                shelf.control.unload(old)
        assert shelf.held() == {generation: "ready"}
    assert shelf.bench.shard.process.poll() is None, f"the shard died after {current}"


def test_a_model_is_loaded_beside_one_that_serves_and_answers_who_names_it(fresh: Shelf) -> None:
    old = fresh.router()
    old.admit(Ask(PROMPTS[0], 24))
    generation = fresh.generation()
    stages = []
    for step in fresh.control.loading(fresh.models["two"].path, generation):
        stages.append((step.stage, step.percent))
        if old.batch is not None:
            old.step()
    names = [stage for stage, _ in stages]
    assert sorted(set(names), key=names.index) == ["checking", "loading", "proving", "loaded"]
    assert [percent for stage, percent in stages if stage == "loading"] == [0.0, 50.0, 100.0]

    old.admit(Ask(PROMPTS[1], 12))
    (named,) = fresh.router(generation).run(Ask(PROMPTS[1], 12))
    old.finish()
    plain = old.outcomes[1]
    assert named.ids == fresh.said_by("two", PROMPTS[1], 12)
    assert plain.ids == fresh.said_by("one", PROMPTS[1], 12)
    assert named.ids != plain.ids, "the two models cannot be told apart"
    assert old.outcomes[0].ids == fresh.said_by("one", PROMPTS[0], 24)


def test_each_models_requests_keep_their_ids_and_blocks_apart(fresh: Shelf) -> None:
    """Both routers count from 0 and deal the same blocks: nothing of that may meet."""
    first = fresh.published()
    second = fresh.generation()
    fresh.control.load(fresh.models["two"].path, second)
    one, two = fresh.router(first), fresh.router(second)
    one.admit(*(Ask(text, 16) for text in PROMPTS))
    two.admit(*(Ask(text, 16) for text in PROMPTS))
    for _ in range(8):
        one.step()
        two.step()
    two.cancel(1, 2)
    one.finish()
    two.finish()
    assert [one.outcomes[i].ids for i in range(4)] == [fresh.said_by("one", text, 16) for text in PROMPTS]
    assert [two.outcomes[i].ids for i in (0, 3)] == [fresh.said_by("two", PROMPTS[i], 16) for i in (0, 3)]


def test_an_unloaded_model_is_gone_and_its_memory_told(fresh: Shelf) -> None:
    generation = fresh.generation()
    loaded = fresh.control.load(fresh.models["two"].path, generation)
    freed = fresh.control.unload(generation)
    assert freed >= loaded.weight_bytes > 0
    assert generation not in fresh.held()
    with pytest.raises(grpc.RpcError) as caught:
        fresh.router(generation).run(Ask("x", 2))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"generation {generation} is not held" in caught.value.details()


def test_a_router_that_knows_one_model_is_served_across_a_change(fresh: Shelf) -> None:
    """TGI's router never lets its batch run dry: new requests join, the old ones go on, each with its own model."""
    router = fresh.router()
    router.admit(*(Ask(text, 40) for text in PROMPTS))
    before = fresh.published()
    generation = fresh.generation()
    for _ in fresh.control.loading(fresh.models["two"].path, generation, compatible=True):
        if router.batch is not None:
            router.step()
    assert fresh.published() == generation
    assert router.batch is not None, "the old requests ended before the change: the test shows nothing"
    asks = [Ask(text, 20) for text in PROMPTS[:2]]
    router.admit(*asks)  # with the running batch, as a router does that chunks
    assert fresh.held().keys() == {before, generation}
    for _ in range(4):
        router.step()
    router.cancel(1, 4)
    router.admit(Ask(PROMPTS[3], 8))
    router.finish()
    assert [router.outcomes[i].ids for i in (0, 2, 3)] == [fresh.said_by("one", PROMPTS[i], 40) for i in (0, 2, 3)]
    assert router.outcomes[5].ids == fresh.said_by("two", PROMPTS[1], 20)
    assert router.outcomes[6].ids == fresh.said_by("two", PROMPTS[3], 8)
    for _ in range(100):
        if fresh.held() == {generation: "ready"}:
            break
        router.run(Ask("a", 2))
    assert fresh.held() == {generation: "ready"}, "the old model stays although nothing of it runs"


def test_the_command_line_changes_a_shard_that_has_no_router_of_ours(fresh: Shelf) -> None:
    stem, said = str(fresh.bench.shard.socket).removesuffix("-0"), list[str]()
    assert load_behind_tgi(stem, str(fresh.models["two"].path), {}, said.append) == 0
    assert "loading 100 %" in said
    (answer,) = fresh.router().run(Ask(PROMPTS[0], 8))
    assert answer.ids == fresh.said_by("two", PROMPTS[0], 8)
    with pytest.raises(ModelsError, match="no such folder"):
        load_behind_tgi(stem, "/nowhere/at/all", {}, said.append)


@pytest.mark.parametrize(
    ("drop_weights", "keep_pages"), [(False, False), (True, False), (False, True)], ids=["pages", "all", "nothing"]
)
def test_a_model_that_sleeps_gives_memory_back_and_wakes_as_it_was(
    fresh: Shelf, drop_weights: bool, keep_pages: bool
) -> None:
    generation = fresh.published()
    fresh.router().run(*(Ask(text, 60) for text in PROMPTS))  # touches pages
    before = fresh.control.status().models[0]
    freed = fresh.control.sleep(generation, drop_weights, keep_pages)
    assert (freed >= 4 * 4096) is not keep_pages
    assert freed >= (before.weight_bytes if drop_weights else 0)
    assert fresh.held() == {generation: "sleeping"}
    with pytest.raises(grpc.RpcError) as caught:
        fresh.router().run(Ask("x", 2))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    stages = fresh.control.wake(generation)
    assert stages[-1] == "awake"
    assert ("loading" in stages) is drop_weights
    after = fresh.control.status().models[0]
    assert (after.weight_bytes, after.cache_bytes) == (before.weight_bytes, before.cache_bytes)
    (answer,) = fresh.router().run(Ask(PROMPTS[2], 12))
    assert answer.ids == fresh.said_by("one", PROMPTS[2], 12)


def test_a_model_is_loaded_and_published_while_another_sleeps(fresh: Shelf, tmp_path: Path) -> None:
    sleeper = fresh.published()
    fresh.control.sleep(sleeper, False)
    shutil.copytree(fresh.models["two"].path, tmp_path / "spoiled")
    truncated(tmp_path / "spoiled")
    code, _ = fresh.control.refusal(tmp_path / "spoiled", fresh.generation())
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert fresh.held() == {sleeper: "sleeping"}
    generation = fresh.generation()
    fresh.control.load(fresh.models["two"].path, generation)
    assert fresh.control.publish(generation) == sleeper
    (answer,) = fresh.router().run(Ask(PROMPTS[2], 12))
    assert answer.ids == fresh.said_by("two", PROMPTS[2], 12)
    fresh.control.unload(sleeper)
    (answer,) = fresh.router(generation).run(Ask(PROMPTS[2], 12))
    assert answer.ids == fresh.said_by("two", PROMPTS[2], 12)


@pytest.mark.parametrize("drop_weights", [False, True], ids=["pages", "all"])
def test_the_process_is_smaller_by_what_sleeping_freed(fresh: Shelf, tmp_path: Path, drop_weights: bool) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "max_position_embeddings": 1024}
    large = tiny_checkpoint(tmp_path / "large", "llama", "awq-gemm", config=wide)
    generation = fresh.generation()
    fresh.control.load(large.path, generation, kv_memory_bytes=64 << 20)
    fresh.control.publish(generation)

    def say() -> list[int]:
        (answer,) = fresh.router(generation).run(Ask(PROMPTS[0] * 20, 12))
        return list(answer.ids)

    before = say()
    awake = fresh.bench.shard.rss_bytes()
    freed = fresh.control.sleep(generation, drop_weights)
    assert freed > (20e6 if drop_weights else 3e6)
    asleep = fresh.bench.shard.rss_bytes()
    assert awake - asleep > 0.8 * freed
    fresh.control.wake(generation)
    assert say() == before == GreedyOracle(large.reference()).greedy(fresh.bench.encode(PROMPTS[0] * 20), 12)
    assert fresh.bench.shard.rss_bytes() - asleep > 0.8 * freed


def test_pages_without_weights_are_not_kept(fresh: Shelf) -> None:
    with pytest.raises(grpc.RpcError, match="keep_pages: got drop_weights too") as caught:
        fresh.control.sleep(fresh.published(), drop_weights=True, keep_pages=True)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert fresh.held() == {fresh.published(): "ready"}


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_a_tensor(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "gone"}}))


def small_vocabulary(folder: Path) -> None:
    change_config(folder, vocab_size=200)


def foreign_tokenizer(folder: Path) -> None:
    tiny_checkpoint(folder, "llama", "awq-gemm", config={"vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2})


def other_width(folder: Path) -> None:
    change_config(folder, intermediate_size=256)


def other_groups(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    change_config(folder, quantization_config=config["quantization_config"] | {"group_size": 64})


def strange_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5000]}))


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def not_numbers(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def wrong_hash(folder: Path) -> None:
    write_manifest(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def unlisted(folder: Path) -> None:
    write_manifest(folder)
    (folder / "more.safetensors").write_bytes(b"")


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def write_manifest(folder: Path) -> str:
    """As `sha256sum *` does."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


SPOILED: dict[Spoil, str] = {
    truncated: "model.safetensors",
    without_a_tensor: "gone",
    small_vocabulary: "embed_tokens.weight has shape [320, 128]; expected [200, 128]",
    foreign_tokenizer: "tokenizer.json has ids up to 275, config.json says vocab_size 200",
    other_width: "expected",
    other_groups: "q_proj.scales has shape [4, 128]; expected [2, 128]",
    strange_end: "end tokens [5000]",
    broken_tokenizer: "tokenizer.json",
    not_numbers: "not finite",
    wrong_hash: "model.safetensors: has SHA-256",
    unlisted: "does not list more.safetensors",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_spoiled_model_is_refused_by_name_and_leaves_everything_as_it_was(
    fresh: Shelf, tmp_path: Path, spoil: Spoil
) -> None:
    folder = tmp_path / "spoiled"
    shutil.copytree(fresh.models["two"].path, folder)
    spoil(folder)
    before, published = fresh.held(), fresh.published()
    code, text = fresh.control.refusal(folder, fresh.generation())
    assert SPOILED[spoil] in text
    assert code in {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED}
    assert (fresh.held(), fresh.published()) == (before, published)
    (answer,) = fresh.router().run(Ask(PROMPTS[0], 6))
    assert answer.ids == fresh.said_by("one", PROMPTS[0], 6)


def test_a_model_whose_hashes_agree_is_loaded_and_a_pinned_manifest_counts(fresh: Shelf, tmp_path: Path) -> None:
    folder = tmp_path / "sealed"
    shutil.copytree(fresh.models["two"].path, folder)
    pinned = write_manifest(folder)
    assert fresh.control.load(folder, fresh.generation(), manifest_sha256=pinned).weight_bytes
    _, text = fresh.control.refusal(folder, fresh.generation(), manifest_sha256="0" * 64)
    assert f"has SHA-256 {pinned}" in text
    _, text = fresh.control.refusal(fresh.models["two"].path, fresh.generation(), manifest_sha256=pinned)
    assert "has no SHA256SUMS" in text


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"quantize": "gptq"}, grpc.StatusCode.FAILED_PRECONDITION, "quantize: got gptq"),
        (
            {"limits": control_pb2.Limits(max_prefill_tokens=64, max_total_tokens=4096)},
            grpc.StatusCode.FAILED_PRECONDITION,
            "max_total_tokens: got 4096, expected 2 to 512",
        ),
        ({"kv_memory_bytes": 4096}, grpc.StatusCode.RESOURCE_EXHAUSTED, "KV cache: needs"),
        ({"kv_memory_bytes": 1 << 50}, grpc.StatusCode.RESOURCE_EXHAUSTED, "bytes were asked for"),
        ({"revision": "main", "limits": LIMITS}, None, ""),
    ],
    ids=["quantize", "limits", "small cache", "large cache", "control"],
)
def test_wishes_that_cannot_be_kept_are_refused_with_numbers(
    fresh: Shelf, fields: dict[str, object], code: grpc.StatusCode | None, text: str
) -> None:
    model = fresh.models["two"].path
    if code is None:
        assert fresh.control.load(model, fresh.generation(), **fields).generation
        return
    found, told = fresh.control.refusal(model, fresh.generation(), **fields)
    assert (found, text in told) == (code, True), told


def test_a_generation_is_used_once(fresh: Shelf) -> None:
    code, text = fresh.control.refusal(fresh.models["two"].path, fresh.published())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected more than" in text


def test_an_incompatible_model_is_refused_behind_a_router_of_one(fresh: Shelf, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "wide", "llama", "awq-gemm", seed=3, config={"vocab_size": 384})
    code, text = fresh.control.refusal(other.path, fresh.generation(), compatible=True)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "vocabulary 384 and not 320" in text
    assert len(fresh.held()) == 1


def test_a_router_that_names_its_models_is_not_passed_over(fresh: Shelf) -> None:
    """Loaded past it, it would go on naming a model that is gone, and serve nothing ever after."""
    before = fresh.published()
    following = fresh.control.stub.Watch(control_pb2.WatchRequest(), timeout=60)
    next(iter(following))
    code, text = fresh.control.refusal(fresh.models["two"].path, fresh.generation(), compatible=True)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "ask the router instead" in text
    (named,) = fresh.router(before).run(Ask(PROMPTS[0], 8))
    assert named.ids == fresh.said_by("one", PROMPTS[0], 8)
    following.cancel()
    stem = str(fresh.bench.shard.socket).removesuffix("-0")
    for _ in range(100):  # the shard hears of the cancelling a little later
        with contextlib.suppress(ModelsError):
            assert load_behind_tgi(stem, str(fresh.models["two"].path), {}, lambda _: None) == 0
            break
    (answer,) = fresh.router().run(Ask(PROMPTS[0], 8))
    assert answer.ids == fresh.said_by("two", PROMPTS[0], 8)


def test_a_load_that_nobody_waits_for_is_given_up(fresh: Shelf) -> None:
    answers = fresh.control.stub.Load(
        control_pb2.LoadRequest(
            generation=fresh.generation(),
            source=control_pb2.Source(model_id=str(fresh.models["two"].path)),
            limits=LIMITS,
        )
    )
    next(iter(answers))
    answers.cancel()
    # The next change finds the way free, at once or when the loader has noticed.
    generation = fresh.generation()
    assert fresh.control.load(fresh.models["two"].path, generation).generation == generation
    assert len(fresh.held()) == 2


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_a_load_right_behind_one_that_was_given_up_is_not_refused(fresh: Shelf, stages: int) -> None:
    for _ in range(8):
        answers = fresh.control.loading(fresh.models["two"].path, fresh.generation())
        for _ in range(stages):
            next(answers)
        answers.cancel()  # type: ignore[attr-defined]
        generation = fresh.generation() + 1  # the one given up may not have been seen yet
        assert fresh.control.load(fresh.models["two"].path, generation).generation == generation
        fresh.control.unload(generation)
        for left in set(fresh.held()) - {fresh.published()}:  # it was whole before the word that it is given up came
            assert fresh.held()[left] == "ready"
            fresh.control.unload(left)
    assert fresh.held() == {fresh.published(): "ready"}
