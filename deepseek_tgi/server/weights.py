"""`download-weights`: nothing to do when the weights are there, else fetch them from the hub; safetensors only."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from deepseek_tgi.config import DownloadConfig
from deepseek_tgi.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

WANTED = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*")
"""Small files beside the weights. Never `*.bin` or `*.pt`: no pickle is read, so none is fetched."""

INDEX = "model.safetensors.index.json"


def prepare(config: DownloadConfig) -> Path:
    """The folder that holds the weights of `config.model_id`, fetched if need be.

    Raises `ConfigError` without a model, `CheckpointError` if the weights cannot be had.
    """
    if not config.model_id:
        raise ConfigError("download-weights: no model; expected `download-weights MODEL_ID`, a hub id or a folder")
    if config.weights_cache_override:
        return _local(Path(config.weights_cache_override), config.extension, "WEIGHTS_CACHE_OVERRIDE")
    folder = Path(config.model_id)
    if folder.exists():
        return _local(folder, config.extension, "model")
    cached = _snapshot(config, offline=True)
    if cached is not None and missing_files(cached, config.extension) == []:
        logger.info("weights of %s are in the hub cache", config.model_id)
        return cached
    logger.info("fetching %s from the hub", config.model_id)
    fetched = _snapshot(config, offline=False)
    if fetched is None:
        raise CheckpointError(f"{config.model_id}: the hub gave nothing")
    return _local(fetched, config.extension, config.model_id)


def missing_files(folder: Path, extension: str) -> list[str]:
    """Weight files named by the index that are absent; without an index, the pattern if no file has the extension."""
    index = folder / INDEX
    if extension == ".safetensors" and index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index: {type(error).__name__}: {error}") from error
        return sorted(str(name) for name in names if not (folder / str(name)).is_file())
    return [] if any(folder.glob(f"*{extension}")) else [f"*{extension}"]


def _local(folder: Path, extension: str, what: str) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{what} {folder}: not a folder; expected a folder with config.json and *{extension}")
    missing = missing_files(folder, extension)
    if missing:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; it has {', '.join(pickles[:3])}, which are pickles and are never read" if pickles else ""
        raise CheckpointError(f"{what} {folder}: no {', '.join(missing[:5])}{hint}")
    return folder


def _snapshot(config: DownloadConfig, offline: bool) -> Path | None:
    """The hub's folder of the model; None if `offline` and it is not cached."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    fetch: Callable[..., str] = huggingface_hub.snapshot_download
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *_network_errors())
    try:
        patterns = [f"*{config.extension}", *WANTED]
        return Path(fetch(config.model_id, revision=config.revision, allow_patterns=patterns, local_files_only=offline))
    except HFValidationError as error:
        raise CheckpointError(f"model {config.model_id!r}: no such folder, and not a hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        if offline:
            return None
        raise CheckpointError(f"model {config.model_id!r}: no such folder, and the hub cannot be reached") from error
    except failures as error:
        raise CheckpointError(f"model {config.model_id!r}: {type(error).__name__}: {error}") from error


def _network_errors() -> tuple[type[Exception], ...]:
    """Whatever HTTP client this hub version uses."""
    try:
        import httpx
    except ImportError:
        return ()
    return (httpx.HTTPError,)
