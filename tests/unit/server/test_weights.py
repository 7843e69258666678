"""Which folders count as having their weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from deepseek_tgi.config import DownloadConfig
from deepseek_tgi.errors import CheckpointError
from deepseek_tgi.server.weights import prepare


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_file_that_the_index_names_must_be_there(folder: Path) -> None:
    (folder / "model-1-of-2.safetensors").touch()
    with pytest.raises(CheckpointError, match=r": no model-2-of-2\.safetensors$"):
        prepare(DownloadConfig(str(folder)))
    (folder / "model-2-of-2.safetensors").touch()
    assert prepare(DownloadConfig(str(folder))) == folder


def test_an_index_beside_a_single_file_says_nothing(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    assert prepare(DownloadConfig(str(folder))) == folder


def test_a_file_is_no_folder_and_not_absent_either(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a folder; expected one with config\.json"):
        prepare(DownloadConfig(str(file)))
    with caplog.at_level(logging.INFO), pytest.raises(CheckpointError, match="absent: no such folder; expected one"):
        prepare(DownloadConfig(str(tmp_path / "absent")))
    assert "from the hub" not in caplog.text
