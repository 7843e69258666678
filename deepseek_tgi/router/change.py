"""A change of the served model: what is wished, how far it is, and the files of what was loaded."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.errors import ModelChangeError
from deepseek_tgi.router.model_files import ModelFiles, load_model_files

PLANS = ("auto", "beside", "drain")
Stamp = tuple[tuple[str, int, int], ...]
READ = ("*.safetensors", "*.json", "*.jinja")


@dataclass(frozen=True, slots=True)
class Wish:
    """A model that somebody wants served; None leaves a matter open."""

    model_id: str
    revision: str | None = None
    quantize: str | None = None
    manifest_sha256: str | None = None
    plan: str = "auto"


@dataclass(slots=True)
class Change:
    """One change and how far it is; `pause_s` is how long new requests were held. Changed by `ModelChanges` alone."""

    kind: str
    model: str
    state: str = "running"
    plan: str = ""
    stage: str = ""
    percent: float = 0.0
    error: str = ""
    generation: int = 0
    started_at: float = field(default_factory=time.time)
    seconds: float = 0.0
    pause_s: float = 0.0
    steps: int = 0

    @property
    def said(self) -> str:
        """What goes on, in words."""
        how_far = f" ({self.stage} {self.percent:.0f} %)" if self.stage else ""
        return f"{self.kind} {self.model}{how_far}"


def is_plain(wish: Wish) -> bool:
    """True if nothing is to be checked or done in a certain way: only this model, and perhaps this revision."""
    return wish.quantize is None and wish.manifest_sha256 is None and wish.plan == "auto"


def stamp_of(folder: Path) -> Stamp:
    """Name, size and time of every file that a load reads: equal while nobody has changed one."""
    try:
        found = [path for pattern in READ for path in folder.glob(pattern)]
        return tuple(sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found))
    except OSError:
        return ()


def files_of(config: RouterConfig, loaded: pb.LoadedModel) -> ModelFiles:
    """Tokenizer and template of what the shards loaded. Raises `ModelChangeError` if another tokenizer lies there."""
    found = hashlib.sha256((Path(loaded.folder) / "tokenizer.json").read_bytes()).hexdigest()
    if found != loaded.tokenizer_sha256:
        raise ModelChangeError(f"{loaded.folder}/tokenizer.json changed while the model was loaded")
    return load_model_files(config)
