"""Which kernel multiplies a weight by how many rows: as measured on such a GPU, else by rule.

Measurements live in tables: the user's own, which `deepseek-tgi tune` writes for this GPU, these sources and these
versions, and the one shipped for the GPU, if there is one. A table holds numbers of rows in steps; between two of them
the larger one's choice serves. What cannot run (another group size, too little shared memory) is passed over, so a
table can be wrong about speed only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from deepseek_tgi.errors import ResourceError
from deepseek_tgi.kernels.compiler import cache_folder
from deepseek_tgi.kernels.cuda.program import SOURCE_FOLDER
from deepseek_tgi.kernels.int4_linear import panel, stream, wide
from deepseek_tgi.kernels.int4_linear.layout import CudaInt4
from deepseek_tgi.kernels.int4_linear.panel import PanelShape
from deepseek_tgi.kernels.int4_linear.stream import StreamShape
from deepseek_tgi.kernels.int4_linear.wide import WideShape

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
"""Numbers of rows that are measured."""
_MANY_ROWS = 1024
"""What is fastest for so many is so for more."""
SHIPPED = Path(__file__).with_name("tables")

Choice = StreamShape | PanelShape | WideShape | None
"""None: dequantise, then torch's product."""
_KINDS: dict[str, type[StreamShape] | type[PanelShape] | type[WideShape]] = {
    "stream": StreamShape,
    "panel": PanelShape,
    "wide": WideShape,
}


def key_of(w: CudaInt4) -> str:
    """What two weights share that take the same time."""
    return f"{w.out_features}x{w.in_features}g{w.group}"


def runs(choice: Choice, rows: int, w: CudaInt4, capability: int) -> bool:
    """Whether the chosen kernel can multiply `w` by `rows` rows on a device of `capability`."""
    if isinstance(choice, StreamShape):
        return rows <= stream.MAX_ROWS and stream.fits(choice, rows, w, capability)
    if isinstance(choice, WideShape):
        return wide.fits(choice, w, capability)
    return choice is None or panel.fits(choice, w, capability)


@dataclass(frozen=True, slots=True)
class Table:
    """Measured choices by weight and number of rows."""

    origin: str
    weights: Mapping[str, Mapping[int, Choice]]

    def choice(self, w: CudaInt4, rows: int, capability: int) -> tuple[bool, Choice]:
        """Whether this table knows, and what."""
        steps = self.weights.get(key_of(w), {})
        step = min((step for step in steps if step >= rows), default=max(steps, default=0))
        measured = step >= min(rows, _MANY_ROWS)
        if not measured or not runs(steps[step], rows, w, capability):
            return False, None
        return True, steps[step]


@dataclass(frozen=True, slots=True)
class Chooser:
    """Decides once for each weight and number of rows; says once for each weight that nobody measured it."""

    tables: tuple[Table, ...]
    multiprocessors: int
    capability: int
    _known: dict[tuple[str, int], Choice] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def choice(self, w: CudaInt4, rows: int) -> Choice:
        """The kernel for `rows` rows of x, which can run."""
        found = self._known.get((key_of(w), rows), ...)
        if found is not ...:
            return found
        chosen = self._decide(w, rows)
        self._known[key_of(w), rows] = chosen
        return chosen

    def _decide(self, w: CudaInt4, rows: int) -> Choice:
        for table in self.tables:
            known, chosen = table.choice(w, rows, self.capability)
            if known:
                return chosen
        if key_of(w) not in self._said:
            self._said.add(key_of(w))
            logger.info(
                "INT4 weight %s: not measured on this GPU, kernels are chosen by rule (deepseek-tgi tune measures)",
                key_of(w),
            )
        candidates = by_rule(w, rows, self.multiprocessors, self.capability)
        return next((shape for shape in candidates if runs(shape, rows, w, self.capability)), None)


def by_rule(w: CudaInt4, rows: int, multiprocessors: int, capability: int) -> Iterable[Choice]:
    """Kernels in the order to try, for a weight nobody has measured."""
    if rows <= stream.MAX_ROWS:
        yield from stream.candidates(w, rows, multiprocessors, capability)
    yield from wide.default_shapes(w, rows, multiprocessors)
    yield from panel.default_shapes(w, rows, multiprocessors)


def tables_for(device: torch.device) -> tuple[Table, ...]:
    """The user's table for the device, then the shipped one; says which there are."""
    if device.type != "cuda":
        return ()
    found = [read_table(path) for path in (user_table(device), SHIPPED / f"{slug(device)}.json")]
    tables = tuple(table for table in found if table is not None)
    origins = ", ".join(table.origin for table in tables)
    logger.info("INT4 kernels for %s: %s", torch.cuda.get_device_name(device), origins or "no table; chosen by rule")
    return tables


def slug(device: torch.device) -> str:
    """The GPU's name as a file's."""
    return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-").lower()


def user_table(device: torch.device) -> Path:
    """Where `deepseek-tgi tune` keeps its measurements on the device: by GPU, kernel sources and versions."""
    state = hashlib.sha256(repr((torch.__version__, torch.version.cuda)).encode())
    shared = [SOURCE_FOLDER / name for name in ("copy_engine.cuh", "device.cuh", "warpgroup.cuh")]
    for source in sorted([*SOURCE_FOLDER.glob("int4_*.cu*"), *shared]):
        state.update(source.read_bytes())
    return cache_folder() / "tuned" / f"{slug(device)}-{state.hexdigest()[:12]}.json"


def read_table(path: Path) -> Table | None:
    """A table's file; None if there is none. A file that does not read is named in a warning and passed over; entries
    of shapes that are none in this version are left out."""
    try:
        content = json.loads(path.read_text())
        entries = [
            (key, int(rows), dict(entry)) for key, steps in content["weights"].items() for rows, entry in steps.items()
        ]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("kernel table %s: %s; passed over", path, error)
        return None
    weights: dict[str, dict[int, Choice]] = {}
    for key, rows, entry in entries:
        try:
            weights.setdefault(key, {})[rows] = _from_json(entry)
        except (ValueError, KeyError, TypeError, ArithmeticError, AssertionError) as error:
            logger.debug("kernel table %s, %s by %d rows: %s; left out", path, key, rows, error)
    return Table(path.name, weights)


def write_table(path: Path, weights: Mapping[str, Mapping[int, Choice]], about: Mapping[str, str]) -> None:
    """Write a table whole; `about` says where it was measured. Raises `ResourceError` for a path that cannot be."""
    content = {
        **about,
        "weights": {
            key: {str(rows): _to_json(choice) for rows, choice in sorted(steps.items())}
            for key, steps in sorted(weights.items())
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        raise ResourceError(f"kernel table {path}: cannot be written: {error.strerror}") from error


def _to_json(choice: Choice) -> dict[str, int | str]:
    if choice is None:
        return {"kernel": "dequantise"}
    return {"kernel": next(name for name, kind in _KINDS.items() if isinstance(choice, kind)), **asdict(choice)}


def _from_json(entry: dict[str, int | str]) -> Choice:
    values = dict(entry)
    kind = str(values.pop("kernel"))
    return None if kind == "dequantise" else _KINDS[kind](**{key: int(value) for key, value in values.items()})
