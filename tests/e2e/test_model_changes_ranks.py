"""A model of two ranks is changed: all leave the old one, meet again for the new one, and answer as one."""

from __future__ import annotations

from pathlib import Path

from builders import tiny_checkpoint
from launched_server import LaunchedServer, await_true
from oracles.greedy import GreedyOracle
from tokenizers import Tokenizer

TOKEN = "let-me-change-models"


def test_two_ranks_change_their_model_and_go_back_when_it_fails(tmp_path: Path) -> None:
    repository, said = tmp_path / "models", {}
    for name, seed in (("one", 1), ("two", 2)):
        model = tiny_checkpoint(repository / name, "llama", "awq-gemm", seed=seed)
        prompt = Tokenizer.from_file(str(model.path / "tokenizer.json")).encode("hello world").ids
        said[name] = GreedyOracle(model.reference()).greedy(prompt, 8)
    spoiled = tiny_checkpoint(repository / "spoiled", "llama", "awq-gemm", seed=3).path / "model.safetensors"
    spoiled.write_bytes(spoiled.read_bytes()[:-3000])
    environment = {"DEEPSEEK_TGI_ADMIN_TOKEN": TOKEN, "DEEPSEEK_TGI_MODEL_REPOSITORY": str(repository)}
    extra = ["--num-shard", "2", "--max-total-tokens", "256", "--max-input-tokens", "200", "--kv-memory", "1MiB"]
    server = LaunchedServer.start(
        repository / "one", tmp_path, [*extra, "--dtype", "float32", "--kv-cache-dtype", "float32"], environment
    )
    headers = {"authorization": f"Bearer {TOKEN}"}

    def load(name: str) -> tuple[int, dict[str, object]]:
        answer = server.http.post(
            f"{server.url}/admin/models/load", json={"model_id": name}, headers=headers, timeout=120
        )
        return answer.status_code, answer.json()

    def ids() -> list[int]:
        tokens = server.generate("hello world", max_new_tokens=8)["details"]["tokens"]
        return [token["id"] for token in tokens]

    try:
        assert ids() == said["one"]
        status, change = load("two")
        assert (status, change.get("plan")) == (200, "drain"), change
        assert ids() == said["two"]
        status, failed = load("spoiled")
        assert status == 409
        assert "was loaded again and serves" in str(failed["error"])
        assert ids() == said["two"]
        await_true(server.idle, "nothing runs")
    finally:
        server.stop()
