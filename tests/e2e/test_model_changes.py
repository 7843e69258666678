"""Models changed in a running server, seen from outside: what clients get, what stays, what is refused and why."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import tiny_checkpoint
from launched_server import LaunchedServer, await_true, run_to_the_end
from oracles.greedy import GreedyOracle
from tokenizers import Tokenizer

TOKEN = "let-me-change-models"
PROMPTS = ("hello world", "the cat sat on the mat", "in the end", "once upon a time")
NEW_TOKENS = 24


@dataclass
class Site:
    """A server with a repository of models, and what `transformers` says with each one's weights."""

    server: LaunchedServer
    repository: Path
    expected: dict[str, dict[str, list[int]]]

    def admin(self, path: str, body: Any = None, token: str = TOKEN) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        url = f"{self.server.url}/admin/models{path}"
        if body is None:
            return self.server.http.get(url, headers=headers)
        return self.server.http.post(url, json=body, headers=headers, timeout=120)

    def load(self, name: str, **fields: Any) -> dict[str, Any]:
        answer = self.admin("/load", {"model_id": name, **fields})
        assert answer.status_code == 200, answer.text
        change: dict[str, Any] = answer.json()
        return change

    def serving(self) -> str | None:
        found = self.admin("").json()["serving"]
        return None if found is None else str(found["model_id"])

    def says(self, text: str) -> list[int]:
        answer = self.server.generate(text, max_new_tokens=NEW_TOKENS)
        return [token["id"] for token in answer["details"]["tokens"]]

    def speaker(self, text: str, ids: list[int]) -> str:
        """The one model that says this."""
        speakers = [name for name, said in self.expected.items() if said[text] == ids]
        assert len(speakers) == 1, f"{text!r}: {ids} is what {speakers or 'no model'} says"
        return speakers[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    repository = folder / "models"
    expected: dict[str, dict[str, list[int]]] = {}
    for name, seed in (("one", 1), ("two", 2)):
        model = tiny_checkpoint(repository / name, "llama", "awq-gemm", seed=seed)
        oracle, tokenizer = GreedyOracle(model.reference()), Tokenizer.from_file(str(model.path / "tokenizer.json"))
        expected[name] = {
            text: until_end(oracle.greedy(tokenizer.encode(text).ids, NEW_TOKENS), model.path) for text in PROMPTS
        }
    spoil(repository / "two", repository / "spoiled")
    environment = {"DEEPSEEK_TGI_ADMIN_TOKEN": TOKEN, "DEEPSEEK_TGI_MODEL_REPOSITORY": str(repository)}
    extra = ["--max-total-tokens", "512", "--max-input-tokens", "480", "--kv-memory", "4MiB", "--dtype", "float32"]
    extra += ["--kv-cache-dtype", "float32", "--max-batch-prefill-tokens", "512"]
    server = LaunchedServer.start(repository / "one", folder, extra, environment)
    yield Site(server, repository, expected)
    server.stop()


@pytest.fixture
def fresh(site: Site) -> Iterator[Site]:
    """The site with the first model served, and nothing of an earlier change left over."""
    if site.serving() != "one":
        site.load("one")
    await_true(site.server.idle, "nothing runs")
    yield site
    assert site.server.process.poll() is None, site.server.words()


def until_end(ids: list[int], model: Path) -> list[int]:
    """Cut behind the first end token, which the server reports and then stops."""
    from deepseek_tgi.text.tokenizer import TextTokenizer

    ends = TextTokenizer.from_folder(model).eos_token_ids
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def spoil(source: Path, target: Path) -> None:
    """A copy that is cut short."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


@dataclass
class Crowd:
    """Clients that ask without a pause, each on a connection of its own; `answers` are (seconds, prompt, ids).

    Every second one streams; `gaps` are the seconds between its tokens, from asking to the first among them.
    """

    url: str
    answers: list[tuple[float, str, list[int]]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    asked: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, size: int) -> None:
        for number in range(size):
            self._threads.append(threading.Thread(target=self._ask, args=(number,)))
            self._threads[-1].start()

    def await_more(self, count: int) -> None:
        """Return once so many more answers have come."""
        wanted = len(self.answers) + count
        await_true(lambda: len(self.answers) >= wanted or bool(self.failures), "clients are served", 60)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            turn = number
            while not self._over.is_set():
                text = PROMPTS[turn % len(PROMPTS)]
                turn += 1
                self.asked += 1
                started = time.monotonic()
                body = {"inputs": text, "parameters": {"max_new_tokens": NEW_TOKENS, "details": True}}
                try:
                    ids = self._streamed(client, body) if number % 2 else self._whole(client, body)
                except (httpx.HTTPError, RuntimeError) as error:
                    self.failures.append(str(error) or type(error).__name__)
                else:
                    self.answers.append((time.monotonic() - started, text, ids))

    def _whole(self, client: httpx.Client, body: dict[str, Any]) -> list[int]:
        answer = client.post(f"{self.url}/generate", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    def _streamed(self, client: httpx.Client, body: dict[str, Any]) -> list[int]:
        ids, last, ended = [], time.monotonic(), False
        with client.stream("POST", f"{self.url}/generate_stream", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data:"):
                    continue
                event = json.loads(line.removeprefix("data:"))
                if "token" not in event:
                    raise RuntimeError(line)
                now = time.monotonic()
                self.gaps.append(now - last)
                last, ended = now, event["generated_text"] is not None
                ids.append(event["token"]["id"])
        if not ended:
            raise RuntimeError(f"a stream ended after {len(ids)} tokens without its end")
        return ids


def test_a_swap_changes_who_answers_and_info_with_it(fresh: Site) -> None:
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "one"
    change = fresh.load("two")
    assert (change["state"], change["plan"], change["model"]) == ("done", "beside", "two")
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "two"
    assert fresh.server.http.get(f"{fresh.server.url}/info").json()["model_id"] == "two"
    assert fresh.server.http.get(f"{fresh.server.url}/v1/models").json()["data"][0]["id"] == "two"
    shown = fresh.admin("").json()
    assert shown["available"] == ["one", "spoiled", "two"]
    assert shown["serving"]["state"] == "ready"


def test_a_stream_that_runs_ends_on_the_model_it_began_with(fresh: Site) -> None:
    text = PROMPTS[1]
    with fresh.server.streaming(text, NEW_TOKENS) as events:
        ids = [next(events)["token"]["id"]]
        fresh.load("two")
        ids += [event["token"]["id"] for event in events]
    assert fresh.speaker(text, ids) == "one"
    assert fresh.speaker(text, fresh.says(text)) == "two"


def test_swaps_under_load_lose_and_mix_nothing(fresh: Site) -> None:
    """Two models that can be told apart, every third load spoiled: what is asked is answered, whole, by one of them."""
    crowd = Crowd(fresh.server.url)
    crowd.start(4)
    try:
        for name in ("two", "one", "spoiled", "two", "one", "spoiled"):
            crowd.await_more(4)
            if name == "spoiled":
                answer = fresh.admin("/load", {"model_id": name})
                assert answer.status_code == 409
                assert "model.safetensors" in answer.json()["error"]
            else:
                fresh.load(name)
    finally:
        crowd.stop()
    assert crowd.failures == []
    assert len(crowd.answers) == crowd.asked
    assert {fresh.speaker(text, ids) for _, text, ids in crowd.answers} == {"one", "two"}


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("spoiled_every", [0, 10])
def test_two_hundred_swaps_under_load(fresh: Site, spoiled_every: int) -> None:
    """`pytest tests/e2e/test_model_changes.py -n 0 -m benchmark`: what was measured goes to the results folder."""
    crowd = Crowd(fresh.server.url)
    crowd.start(4)
    took: list[float] = []
    refused = 0
    try:
        crowd.await_more(20)
        calm, before = sorted(crowd.gaps), len(crowd.gaps)
        for number in range(1, 201):
            if spoiled_every and number % spoiled_every == 0:
                answer = fresh.admin("/load", {"model_id": "spoiled"})
                assert answer.status_code == 409, answer.text
                refused += 1
                continue
            took.append(fresh.load("two" if fresh.serving() == "one" else "one")["seconds"])
            crowd.await_more(1)
    finally:
        crowd.stop()
    speakers = [name for _, text, ids in crowd.answers for name, said in fresh.expected.items() if said[text] == ids]
    mixed = len(crowd.answers) - len(speakers)
    assert crowd.failures == []
    assert len(crowd.answers) == crowd.asked
    assert refused == (200 // spoiled_every if spoiled_every else 0)
    gaps, latencies = sorted(crowd.gaps[before:]), sorted(seconds for seconds, _, _ in crowd.answers)
    found = {
        "asked": crowd.asked,
        "completed": len(crowd.answers),
        "mixed": mixed,
        "failed": len(crowd.failures),
        "answers": {name: speakers.count(name) for name in sorted(set(speakers))},
        "swaps": len(took),
        "refused_loads": refused,
        "seconds_a_swap": {"median": statistics.median(took), "max": max(took)},
        "seconds_between_tokens": quantiles(gaps),
        "seconds_between_tokens_before_the_first_swap": quantiles(calm),
        "seconds_an_answer": quantiles(latencies),
    }
    assert mixed == 0
    record(f"spoiled_every_{spoiled_every}", found)


def quantiles(ordered: list[float]) -> dict[str, float]:
    places = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(place * len(ordered)))] for name, place in places.items()}


def record(name: str, found: dict[str, Any]) -> None:
    """Put figures into the results file, beside those that are there."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
    path = folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}-model-swaps.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {
        "command": "python -m pytest tests/e2e/test_model_changes.py -n 0 -m benchmark",
        "models": "two random llamas of 2 layers, AWQ-INT4, told apart by their tokens",
        "clients": "4, without a pause; every second one streams",
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
        name: found,
    }
    path.write_text(json.dumps(known, indent=1) + "\n")


def test_a_failed_load_says_why_and_changes_nothing(fresh: Site) -> None:
    answer = fresh.admin("/load", {"model_id": "spoiled"})
    assert answer.status_code == 409
    assert answer.json()["error_type"] == "model_change"
    assert "spoiled/model.safetensors" in answer.json()["error"]
    assert fresh.serving() == "one"
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "one"
    assert fresh.admin("").json()["history"][-1]["state"] == "failed"
    answer = fresh.admin("/load", {"model_id": "nowhere/at-all"})
    assert answer.status_code == 409
    assert "nowhere/at-all" in answer.json()["error"]


def test_progress_is_told_as_it_comes(fresh: Site) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    url = f"{fresh.server.url}/admin/models/load"
    body = {"model_id": "two", "stream": True}
    with fresh.server.http.stream("POST", url, json=body, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    steps = [json.loads(line.removeprefix("data: ")) for line in lines]
    stages = [step["stage"] for step in steps]
    assert {"checking", "loading", "proving", "loaded"} <= set(stages)
    assert steps[-1]["state"] == "done"
    assert all(step["state"] == "running" for step in steps[:-1])


def test_a_drained_swap_holds_new_requests_until_the_new_model_is_there(fresh: Site) -> None:
    crowd = Crowd(fresh.server.url)
    crowd.start(3)
    try:
        crowd.await_more(4)
        change = fresh.load("two", plan="drain")
        crowd.await_more(4)
    finally:
        crowd.stop()
    assert change["plan"] == "drain"
    assert change["pause_s"] > 0
    assert crowd.failures == []
    assert len(crowd.answers) == crowd.asked
    assert {fresh.speaker(text, ids) for _, text, ids in crowd.answers} == {"one", "two"}
    answer = fresh.admin("/load", {"model_id": "spoiled", "plan": "drain"})
    assert answer.status_code == 409
    assert "was loaded again and serves" in answer.json()["error"]
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "two"
    assert fresh.serving() == "two"


@pytest.mark.parametrize("drop_weights", [False, True])
def test_a_model_sleeps_and_wakes(fresh: Site, drop_weights: bool) -> None:
    slept = fresh.admin("/sleep", {"drop_weights": drop_weights})
    assert slept.status_code == 200, slept.text
    assert fresh.admin("").json()["serving"]["state"] == "sleeping"
    refused = fresh.server.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
    assert (refused.status_code, refused.json()["error_type"]) == (503, "not_ready")
    assert "sleeps" in refused.json()["error"]
    woken = fresh.admin("/wake", {})
    assert woken.status_code == 200, woken.text
    assert fresh.speaker(PROMPTS[2], fresh.says(PROMPTS[2])) == "one"


def test_an_unloaded_server_refuses_work_and_takes_a_model_again(fresh: Site) -> None:
    assert fresh.admin("/unload", {}).status_code == 200
    refused = fresh.server.post("/generate", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
    assert (refused.status_code, refused.json()["error_type"]) == (503, "not_ready")
    assert fresh.serving() is None
    assert fresh.server.http.get(f"{fresh.server.url}/info").status_code == 503
    assert fresh.server.http.get(f"{fresh.server.url}/metrics").status_code == 200
    change = fresh.load("two")
    assert change["plan"] == "empty"
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "two"


@pytest.mark.parametrize("token", [TOKEN[:-1], TOKEN + "x"])
def test_without_the_token_nothing_is_told_or_changed(fresh: Site, token: str) -> None:
    assert fresh.admin("", token=token).status_code == 401
    assert fresh.admin("/load", {"model_id": "two"}, token=token).status_code == 401
    assert fresh.serving() == "one"


def models(site: Site, *argv: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """`deepseek-tgi models …` against the site."""
    environment = {k: v for k, v in os.environ.items() if k != "DEEPSEEK_TGI_ADMIN_TOKEN"}
    if token is not None:
        environment["DEEPSEEK_TGI_ADMIN_TOKEN"] = token
    command = [sys.executable, "-m", "deepseek_tgi.cli", "models", *argv, "--url", site.server.url]
    return run_to_the_end(command, env=environment)


def test_the_command_line_changes_models_and_shows_progress(fresh: Site) -> None:
    loaded = models(fresh, "load", "two")
    assert loaded.returncode == 0, loaded.stderr
    lines = loaded.stdout.splitlines()
    assert {"loading 100 %", "proving 100 %"} <= set(lines)
    assert lines[-1].startswith("load two: done by the plan beside in ")
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "two"
    listed = models(fresh, "list").stdout
    assert "serving   two (ready" in listed
    assert "available one" in listed
    failed = models(fresh, "load", "spoiled")
    assert failed.returncode == 1
    assert "spoiled/model.safetensors" in failed.stderr
    assert "failed  load spoiled" in models(fresh, "status").stdout
    assert models(fresh, "sleep").returncode == models(fresh, "wake").returncode == 0
    assert models(fresh, "unload").returncode == 0
    assert "serving   nothing" in models(fresh, "list").stdout
    assert models(fresh, "load", str(fresh.repository / "one")).returncode == 0
    for token, text in (("wrong", "does not take this token"), (None, "no token; give --token")):
        refused = models(fresh, "list", token=token)
        assert refused.returncode == 2
        assert text in refused.stderr


def test_the_embedded_router_is_not_passed_over(fresh: Site) -> None:
    """The way round TGI's router is refused in front of ours, which goes on serving what it knows."""
    failed = models(fresh, "load", str(fresh.repository / "two"), "--socket", str(fresh.server.uds_stem))
    assert failed.returncode == 1
    assert "ask the router instead" in failed.stderr
    assert fresh.speaker(PROMPTS[0], fresh.says(PROMPTS[0])) == "one"
    nowhere = models(fresh, "load", "x", "--socket", "/nowhere/at-all")
    assert nowhere.returncode == 1
    assert "no shard's socket is there" in nowhere.stderr
    assert fresh.load("two")["state"] == "done"


def test_memory_comes_back(fresh: Site) -> None:
    from launched_server import anonymous_bytes

    for name in ("two", "one"):
        fresh.load(name)
    await_true(fresh.server.idle, "nothing runs")
    before = anonymous_bytes(fresh.server.shard_pid)
    for _ in range(4):
        for name in ("two", "one"):
            fresh.load(name)
    time.sleep(0.5)
    grown = anonymous_bytes(fresh.server.shard_pid) - before
    assert grown < 3e6, f"eight swaps of models of 0.5 MB left {grown} bytes behind"
