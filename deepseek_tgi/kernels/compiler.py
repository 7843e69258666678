"""Builds the native library at first use and keeps it in the user's cache. No torch here.

The file's name is a hash of everything that decides its content: sources, compiler version, flags and this CPU's
features. A build happens in a folder of its own and is renamed into place under a lock, so
that processes starting together build once and none ever loads half a file.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.kernels.compilation import Compilation, RefusedError

logger = logging.getLogger(__name__)

_SOURCE_FOLDER = Path(__file__).with_name("native")
_COMPILERS = ("g++", "c++", "clang++")
_BASE_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-pthread", "-fPIC", "-fvisibility=hidden",
    # Multiply-adds are fused where the source says so and nowhere else: rounding must not depend on the kernel.
    "-ffp-contract=off", "-fno-math-errno",
    "-w", "-Wno-psabi",
)  # fmt: skip
AVX2_FLAGS = ("-mno-avx512f",)
PORTABLE_FLAGS = ("-DDSTGI_PORTABLE", *AVX2_FLAGS)
_WORK_PREFIX = "build-"
_private_folders: set[Path] = set()


class BuildError(Exception):
    """The library cannot be built here; the message says why. Kept inside `kernels`: the caller falls back."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the built file."""

    compiler: str
    flags: tuple[str, ...]

    def digest(self) -> str:
        """Hash of sources, compiler, flags and CPU."""
        state = hashlib.sha256()
        for source in sorted(_SOURCE_FOLDER.iterdir()):
            if source.suffix in {".cpp", ".h"}:
                state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        for part in (_version(self.compiler), " ".join(self.flags).encode(), _cpu_features()):
            state.update(part + b"\0")
        return state.hexdigest()[:20]


def _version(compiler: str) -> bytes:
    answer = subprocess.run([compiler, "--version"], check=False, capture_output=True, timeout=60)
    if answer.returncode:
        words = answer.stderr.decode(errors="replace").strip().partition("\n")[0][:200]
        raise BuildError(f"{compiler} --version failed: {words or f'code {answer.returncode}'}")
    return answer.stdout


def find_compiler(environ: dict[str, str] | None = None) -> str:
    """Path of the C++ compiler: `$CXX` if set, else the first known name on the path. Raises `BuildError`."""
    wish = (os.environ if environ is None else environ).get("CXX")
    names = (wish,) if wish else _COMPILERS
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)}; install g++ or set CXX)")


def cache_folder(environ: dict[str, str] | None = None) -> Path:
    """Where built libraries are kept: `$DEEPSEEK_TGI_CACHE`, else `deepseek-tgi` in the user's cache folder."""
    given = os.environ if environ is None else environ
    if given.get("DEEPSEEK_TGI_CACHE"):
        return Path(given["DEEPSEEK_TGI_CACHE"])
    base = given.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deepseek-tgi"


def build(extra_flags: Sequence[str] = ()) -> Path:
    """Path of the library for this machine, built if it is not cached. Raises `BuildError`."""
    recipe = Recipe(find_compiler(), (*_BASE_FLAGS, *extra_flags))
    try:
        name = f"native-{recipe.digest()}.so"
        kept = cache_folder() / name
        if os.access(kept, os.R_OK):
            return kept
        folder = _writable(cache_folder())
        target = folder / name
        with _lock(folder / "native.lock"):
            if not target.exists():
                _compile(recipe, folder, target)
        return target
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"building the native library failed: {error}") from error


def build_ahead() -> None:
    """Have `build` find its work done, where what it makes is kept. Failures are left for it to tell."""
    if _can_be_written(cache_folder()):
        with suppress(BuildError):
            build()


def discard_private(library: Path) -> None:
    """Remove `library` if it was built outside the cache. Once it is loaded its file is not needed any more."""
    if library.parent in _private_folders:
        _private_folders.remove(library.parent)
        shutil.rmtree(library.parent, ignore_errors=True)


def _cpu_features() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    wanted = (b"flags", b"Features", b"model name")
    return b"\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _can_be_written(folder: Path) -> bool:
    """True if it is there now and files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _writable(folder: Path) -> Path:
    """`folder` if it can be written, else a private temporary folder (then the build is not kept)."""
    if _can_be_written(folder):
        return folder
    private = Path(tempfile.mkdtemp(prefix="deepseek-tgi-"))
    _private_folders.add(private)
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    logger.warning(
        "cache folder %s cannot be written: building the native library in %s, at every start; "
        "set DEEPSEEK_TGI_CACHE to a folder that can",
        *(folder, private),
    )
    return private


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _compile(recipe: Recipe, folder: Path, target: Path) -> None:
    started = time.monotonic()
    logger.info("compiling the native kernels with %s, once for this machine", recipe.compiler)
    for abandoned in folder.glob(f"{_WORK_PREFIX}*"):  # its process is gone: this one holds the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WORK_PREFIX) as work:
        linked = Path(work) / target.name
        try:
            Compilation(recipe.compiler, recipe.flags, _SOURCE_FOLDER, Path(work)).shared_library(linked)
        except RefusedError as error:
            raise BuildError(f"the compiler refused: {str(error)[:2000]}") from error
        linked.replace(target)
    logger.info("native kernels built with %s in %.1f s: %s", recipe.compiler, time.monotonic() - started, target)
