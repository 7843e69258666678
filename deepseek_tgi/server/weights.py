"""`download-weights`: nothing to do when the weights are there, else fetch them from the hub; safetensors only."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from deepseek_tgi.adapters import hub
from deepseek_tgi.config import DownloadConfig
from deepseek_tgi.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 1024 * 1024


def prepare(config: DownloadConfig) -> Path:
    """The folder that holds the weights of `config.model_id`, fetched if need be.

    Raises `ConfigError` without a model, `CheckpointError` if the weights cannot be had.
    """
    if not config.model_id:
        raise ConfigError("download-weights: no model; expected `download-weights MODEL_ID`, a hub id or a folder")
    if config.weights_cache_override:
        return _complete(Path(config.weights_cache_override), config.extension)
    try:
        folder = hub.resolve_folder(config.model_id, config.revision)
    except CheckpointError:
        if hub.is_path(config.model_id):
            raise
        folder = None
    if folder is not None and (Path(config.model_id).exists() or not missing_files(folder, config.extension)):
        return _complete(folder, config.extension)
    logger.info("fetching %s from the hub", config.model_id)
    return _complete(hub.download(config.model_id, config.revision), config.extension)


def missing_files(folder: Path, extension: str) -> list[str]:
    """Weight files named by the index that are absent; without an index, the pattern if no file has the extension.

    Beside a single file an index says nothing, as when loading.
    """
    index = folder / INDEX
    if extension == ".safetensors" and index.is_file() and not (folder / SINGLE_FILE).exists():
        try:
            if index.stat().st_size > MAX_INDEX_BYTES:
                raise ValueError(f"more than {MAX_INDEX_BYTES} bytes")
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index}: not a safetensors index: {type(error).__name__}: {error}") from error
        return sorted(str(name) for name in names if not (folder / str(name)).is_file())
    return [] if any(folder.glob(f"*{extension}")) else [f"*{extension}"]


def _complete(folder: Path, extension: str) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder; expected one with config.json and *{extension}")
    missing = missing_files(folder, extension)
    if missing:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; it has {', '.join(pickles[:3])}, which are pickles and are never read" if pickles else ""
        raise CheckpointError(f"{folder}: no {', '.join(missing[:5])}{hint}")
    return folder
