"""From a model id to a folder, with no network."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path

import huggingface_hub
import pytest

import deepseek_tgi
from deepseek_tgi.adapters import hub
from deepseek_tgi.errors import CheckpointError, ResourceError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HF_HUB_CACHE": str(tmp_path / "hub"), "DEEPSEEK_TGI_CACHE": str(tmp_path / "cache"), "HOME": "/home/x"}


def test_a_folder_is_itself(tmp_path: Path, environ: dict[str, str]) -> None:
    assert hub.resolve_folder(str(tmp_path), None, environ) == tmp_path
    assert hub.download(str(tmp_path), None, environ) == tmp_path


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"DEEPSEEK_TGI_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/models"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/deepseek-tgi/models"),
        ({"DEEPSEEK_TGI_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/x/.cache/deepseek-tgi/models"),
    ],
)
def test_own_cache_follows_the_environment(extra: dict[str, str], expected: str) -> None:
    assert hub.models_cache({"HOME": "/home/x", **extra}) == Path(expected)


def test_alias_is_found_once_made_and_says_how_to_make_it(environ: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match="download-weights smollm2"):
        hub.resolve_folder("smollm2", None, environ)
    made = hub.models_cache(environ) / hub.SMALL_MODEL_FOLDER
    made.mkdir(parents=True)
    assert hub.resolve_folder("smollm2", None, environ) == made


def test_the_bundled_model_lies_in_the_package_and_a_folder_of_its_name_goes_first(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundled = Path(deepseek_tgi.__file__).parent / "models" / "demo"
    assert hub.resolve_folder("demo", None, environ) == hub.download("demo", None, environ) == bundled
    (tmp_path / "demo").mkdir()
    assert hub.resolve_folder("demo", None, environ) == Path("demo")


def test_a_package_without_its_model_says_so(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(deepseek_tgi, "__file__", str(tmp_path / "package" / "__init__.py"))
    with pytest.raises(CheckpointError, match="holds no model; install the package again"):
        hub.resolve_folder("demo", None, environ)


@pytest.mark.parametrize(
    ("model_id", "message"),
    [
        ("", "the model id is empty"),
        ("./no/such", "no such folder"),
        ("/no/such", "no such folder"),
        ("a/b/c", "no such folder"),
        ("two words", "neither a folder nor a hub id"),
        ("owner/name", "fetch it with: deepseek-tgi download-weights owner/name"),
    ],
)
def test_what_is_not_here_is_one_clear_error(model_id: str, message: str, environ: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match=message):
        hub.resolve_folder(model_id, None, environ)


def test_a_shard_never_asks_the_network_and_only_safe_files_are_wanted(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, object]] = []

    def snapshot(repo: str, **options: object) -> str:
        calls.append(options)
        return "/there"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub.resolve_folder("owner/name", "main", environ) == Path("/there")
    assert hub.download("owner/name", None, environ) == Path("/there")
    assert [call["local_files_only"] for call in calls] == [True, False]
    assert calls[0]["revision"] == "main"
    assert calls[0]["cache_dir"] == environ["HF_HUB_CACHE"]
    assert calls[0]["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


@pytest.mark.parametrize(("offline", "why"), [(True, "HF_HUB_OFFLINE is set"), (False, "the hub cannot be reached")])
def test_a_model_that_cannot_be_fetched_says_why(
    offline: bool, why: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repo: str, **options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("nothing here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError, match=f"^owner/name: no such folder, not in the hub cache, and {why}$"):
        hub.download("owner/name", None, environ)


def test_full_disk_is_a_resource_error(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo: str, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ResourceError, match="disk of the hub cache is full"):
        hub.download("owner/name", None, environ)


def test_the_launchers_transfer_switch_is_dropped_without_its_package(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: "/there")
    hub.download("owner/name", None, environ)
    assert "HF_HUB_ENABLE_HF_TRANSFER" not in os.environ
