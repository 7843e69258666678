"""A checkpoint folder: which safetensors files belong to it, which tensors they hold, which were used.

Tensors are views of mapped files; whoever keeps one copies it. Files that hold pickled objects are never opened.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from deepseek_tgi.adapters.json_fields import Fields, read_json, shown
from deepseek_tgi.adapters.safetensors_file import SafetensorsFile, TensorEntry
from deepseek_tgi.errors import CheckpointError

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 2**20
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DERIVED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers that old exporters stored although they follow from the config."""
_NAMES_SHOWN = 5


class Checkpoint:
    """The tensors of one folder by name, with an account of what was read; `move` takes those that are asked for on.

    Not for several threads. `tensor` counts a name as used; `skip` counts names as left out by rule; `finish` reports
    the rest in one line.
    """

    def __init__(self, folder: Path, move: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Map every file. Raises `CheckpointError` for anything missing, doubled, truncated or inconsistent."""
        self.folder = folder
        self._move = move
        weight_map = _read_index(folder)
        names = sorted(set(weight_map.values())) if weight_map else _find_files(folder)
        self._files = [SafetensorsFile(_existing(folder, name)) for name in names]
        self._home: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.entries:
                if name in self._home:
                    raise CheckpointError(
                        f"{folder}: tensor {name} is in both {self._home[name].path.name} and {file.path.name}"
                    )
                self._home[name] = file
        for name, file_name in weight_map.items():
            if name not in self._home or self._home[name].path.name != file_name:
                raise CheckpointError(
                    f"{folder / INDEX_FILE}: places {shown(name)} in {file_name}, which does not hold it"
                )
        self._seen: set[str] = {name for name in self._home if _DERIVED.search(name)}

    def __contains__(self, name: str) -> bool:
        """True if the tensor is stored."""
        return name in self._home

    def names(self) -> Iterable[str]:
        """All stored names."""
        return self._home.keys()

    @property
    def paths(self) -> Sequence[Path]:
        """All files."""
        return [file.path for file in self._files]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype."""
        return self._entry(name).dtype

    def num_bytes_of(self, name: str) -> int:
        """Bytes of one tensor."""
        return self._entry(name).num_bytes

    def tensor(
        self, name: str, shape: tuple[int, ...] | None = None, dtypes: Iterable[torch.dtype] | None = None
    ) -> torch.Tensor:
        """A view of the mapped tensor, or what moving it gave, counted as used.

        Raises `CheckpointError` if shape or dtype is another.
        """
        return self.moved(self.mapped(name, shape, dtypes))

    def mapped(
        self, name: str, shape: tuple[int, ...] | None = None, dtypes: Iterable[torch.dtype] | None = None
    ) -> torch.Tensor:
        """As `tensor`, but always the view of the mapped file: whoever wants a part cuts it, then has it `moved`."""
        self.check(name, shape, dtypes)
        self._seen.add(name)
        stored: torch.Tensor = self._home[name].tensor(name)
        return stored

    def moved(self, stored: torch.Tensor) -> torch.Tensor:
        """`stored` where tensors are wanted."""
        return stored if self._move is None else self._move(stored)

    def check(
        self, name: str, shape: tuple[int, ...] | None = None, dtypes: Iterable[torch.dtype] | None = None
    ) -> None:
        """Raise `CheckpointError` if the tensor is not stored, or in another shape or dtype. Looks at headers only."""
        entry = self._entry(name)
        where = f"{self._home[name].path}: tensor {name}"
        if shape is not None and entry.shape != shape:
            raise CheckpointError(f"{where} has shape {list(entry.shape)}; expected {list(shape)}")
        wanted = tuple(dtypes or (entry.dtype,))
        if entry.dtype not in wanted:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
            raise CheckpointError(f"{where} has dtype {str(entry.dtype).removeprefix('torch.')}; expected {expected}")

    def require(self, names: Iterable[str]) -> None:
        """Raise one `CheckpointError` that names every tensor of `names` that is not stored."""
        missing = [name for name in names if name not in self._home]
        if missing:
            raise CheckpointError(f"{self.folder}: {_listed(missing)} not in the checkpoint{self._hint(missing[0])}")

    def skip(self, names: Iterable[str], why: str) -> None:
        """Count `names` as left out on purpose, in one log line."""
        skipped = [name for name in names if name in self._home]
        self._seen.update(skipped)
        if skipped:
            logger.info("%s: skipped %d tensors: %s", self.folder, len(skipped), why)

    def unused(self) -> list[str]:
        """Names neither used nor skipped."""
        return [name for name in self._home if name not in self._seen]

    def finish(self) -> None:
        """Report tensors that nothing asked for in one warning line, and release the mapped pages."""
        left = self.unused()
        if left:
            logger.warning("%s: ignored %s: no part of this model has that name", self.folder, _listed(left))
        self.release()

    def release(self) -> None:
        """Give mapped pages back to the page cache. Views stay valid; call it after each layer was copied."""
        for file in self._files:
            file.release()

    def _entry(self, name: str) -> TensorEntry:
        self.require((name,))
        return self._home[name].entries[name]

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.unused()[:5000], n=1, cutoff=0.8)
        return f"; the nearest unused name is {near[0]}" if near else ""


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    noun = "tensor" if len(names) == 1 else f"{len(names)} tensors"
    return f"{noun} {', '.join(shown(name) for name in names[:_NAMES_SHOWN])}{rest}"


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name to file name, or nothing if the folder needs no index. A single file wins, as upstream."""
    path = folder / INDEX_FILE
    if (folder / SINGLE_FILE).exists() or not path.exists():
        return {}
    section = Fields(str(path), read_json(path, _MAX_INDEX_BYTES, unique_keys=True)).section("weight_map")
    if section is None or not section.data:
        raise CheckpointError(f"{path}: weight_map is missing or empty; expected tensor names with their files")
    result = {}
    for name, file_name in section.data.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name):
            raise CheckpointError(
                f"{path}: places {shown(name)} in {shown(file_name)!r}; expected a .safetensors file beside it"
            )
        result[name] = file_name
    return result


def _is_plain_name(name: str) -> bool:
    """No folder parts, so that an index cannot reach outside its folder."""
    return name.endswith(".safetensors") and not set(name) & {"/", "\\", "\0"} and not name.startswith(".")


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(
            f"{path}: not there, or no file, though it belongs to the checkpoint: a partial download?"
        )
    return path


def _find_files(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).exists():
        return [SINGLE_FILE]
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(f"{folder}: no .safetensors file{_what_would_work(folder)}")
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
    for match in numbered:
        found = sum(other[1] == match[1] and other[3] == match[3] for other in numbered)
        if found != int(match[3]):
            raise CheckpointError(
                f"{folder}: {found} of {match[3]} files {match[1]}-*-of-{match[3]}.safetensors are there"
            )
    return names


def _what_would_work(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        return (
            f", only {pickled[0]}, a pickle file: reading one can run any code, so it is never opened; take a revision "
            "with safetensors, or save the model again as safetensors on a machine you can lose"
        )
    gguf = sorted(path.name for path in folder.glob("*.gguf"))
    if gguf:
        return f", only {gguf[0]}; turn it into a checkpoint with: deepseek-tgi import-gguf {folder / gguf[0]} OUT"
    return "; expected model.safetensors, or several with model.safetensors.index.json"
