"""From a model id to a folder on disk: a local folder, one of our two aliases, or a Hugging Face hub id.

`resolve_folder` never goes to the network and is what a shard calls; `download` does, and is what `download-weights`
calls first. Only safetensors, JSON and templates are ever fetched: no pickles, no code.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import deepseek_tgi
from deepseek_tgi.errors import CheckpointError, ResourceError

DEMO_MODEL_ID = "demo"
"""Alias of the model inside this package."""
SMALL_MODEL_ID = "smollm2"
"""Alias of the small real model that `convert.small_model` builds into the cache."""
SMALL_MODEL_FOLDER = "SmolLM2-135M-Instruct-AWQ-2"
"""The number counts recipes: raise it when importing or quantising gives other numbers, so that caches are renewed."""
_WANTED = ("*.safetensors", "*.json", "*.jinja")
_UNWANTED = ("*/*", "consolidated*")
"""Subfolders hold other formats of the same weights; `consolidated` files hold them under other names."""


def models_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where models made on this machine are kept: `$DEEPSEEK_TGI_CACHE`, else the user's cache folder."""
    if environ.get("DEEPSEEK_TGI_CACHE"):
        base = Path(environ["DEEPSEEK_TGI_CACHE"])
    elif environ.get("XDG_CACHE_HOME"):
        base = Path(environ["XDG_CACHE_HOME"]) / "deepseek-tgi"
    else:
        base = Path(environ.get("HOME") or Path.home()) / ".cache" / "deepseek-tgi"
    return base / "models"


def resolve_folder(model_id: str, revision: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of `model_id`, which must already be on this machine.

    Raises: `CheckpointError` saying what was looked for and which command would fetch it.
    """
    if not model_id:
        raise CheckpointError("the model id is empty; expected a folder, a hub id, demo or smollm2")
    if Path(model_id).is_dir():
        return Path(model_id)
    if model_id == DEMO_MODEL_ID:
        return _demo_folder()
    if model_id == SMALL_MODEL_ID:
        folder = models_cache(environ) / SMALL_MODEL_FOLDER
        if folder.is_dir():
            return folder
        raise CheckpointError(
            f"{model_id} is not in {folder.parent}; make it with: deepseek-tgi download-weights {model_id}"
        )
    if is_path(model_id):
        what = "not a folder" if Path(model_id).exists() else "no such folder"
        raise CheckpointError(f"{model_id}: {what}; expected one with config.json and .safetensors files")
    return _snapshot(model_id, revision, environ, local_only=True)


def download(model_id: str, revision: str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """As `resolve_folder`, fetching a hub id first unless `HF_HUB_OFFLINE` is set.

    Raises: `CheckpointError` for an unknown, gated or unreachable id, `ResourceError` for a full disk.
    """
    if Path(model_id).is_dir() or model_id in (DEMO_MODEL_ID, SMALL_MODEL_ID) or is_path(model_id):
        return resolve_folder(model_id, revision, environ)
    return _snapshot(model_id, revision, environ, local_only=False)


def _demo_folder() -> Path:
    """The bundled model, wherever this package is installed."""
    folder = Path(deepseek_tgi.__file__).parent / "models" / DEMO_MODEL_ID
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{DEMO_MODEL_ID}: {folder} holds no model; install the package again, whole")
    return folder


def is_path(model_id: str) -> bool:
    """True for what can only be meant as a path: hub ids have at most one slash and start with a letter or digit."""
    return model_id.startswith((".", "/", "~")) or model_id.count("/") > 1


def _snapshot(model_id: str, revision: str | None, environ: Mapping[str, str], local_only: bool) -> Path:
    if os.environ.get("HF_HUB_ENABLE_HF_TRANSFER") and importlib.util.find_spec("hf_transfer") is None:
        # TGI's launcher sets it for every child; older hub clients fail on it when the package is missing.
        del os.environ["HF_HUB_ENABLE_HF_TRANSFER"]
    import huggingface_hub
    from huggingface_hub import errors

    network_errors = (getattr(errors, "HTTPError", OSError), OSError, ValueError)
    try:
        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            cache_dir=environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"),
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            local_files_only=local_only,
        )
    except network_errors as error:
        raise _explain(error, model_id, revision, local_only) from error
    return Path(folder)


def _explain(error: BaseException, model_id: str, revision: str | None, local_only: bool) -> Exception:
    """Our error for one of the hub client's, most telling kind first."""
    import huggingface_hub
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ResourceError(f"{model_id}: the disk of the hub cache is full; free space or set HF_HUB_CACHE elsewhere")
    if local_only:
        absent = f"no such folder, and not in the hub cache; fetch it with: deepseek-tgi download-weights {model_id}"
    else:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        absent = f"no such folder, not in the hub cache, and {why}"
    meanings: tuple[tuple[type[BaseException], str], ...] = (
        (errors.HFValidationError, "neither a folder nor a hub id (owner/name)"),
        (errors.GatedRepoError, "access is gated; accept its terms on the hub and set HF_TOKEN"),
        (errors.RevisionNotFoundError, "the hub has no such revision of it"),
        (errors.RepositoryNotFoundError, "the hub has no such model, or it is private and HF_TOKEN does not open it"),
        (errors.LocalEntryNotFoundError, absent),
    )
    known = next((text for kind, text in meanings if isinstance(error, kind)), absent if local_only else None)
    named = model_id if revision is None else f"{model_id} (revision {revision})"
    return CheckpointError(f"{named}: {known or f'the hub answered with an error: {error}'}")
