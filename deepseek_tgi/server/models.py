"""The models that one shard holds, by generation, and which of them is meant by a call that names none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepseek_tgi.errors import NotReadyError, RequestError
from deepseek_tgi.server.turns import Turns

if TYPE_CHECKING:
    from deepseek_tgi.engine.config import WarmupResult
    from deepseek_tgi.pb import generate_pb2 as pb
    from deepseek_tgi.server.engine_api import EngineApi

GENERATION_KEY = "x-deepseek-generation"
"""Metadata of a call that names its model; no router but ours sends it."""
FIRST_GENERATION = 1
"""Of the model that the process was started with."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from, and what its loader expects of it (None: anything)."""

    model_id: str
    revision: str | None = None
    quantize: str | None = None
    manifest_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Demand:
    """Limits that a model must keep, as `Warmup` states them; None leaves the choice to the shard."""

    max_input_tokens: int | None
    max_prefill_tokens: int
    max_total_tokens: int | None


@dataclass(slots=True, eq=False)
class Held:
    """One model. `engine` is None while its weights sleep on disk; `limits` None until it was warmed up.

    `turns` refers to the engine; `cache_bytes` is what its pages took before it slept.
    """

    generation: int
    source: Source
    engine: EngineApi | None
    turns: Turns
    info: pb.InfoResponse
    demand: Demand | None = None
    limits: WarmupResult | None = None
    asleep: bool = False
    cache_bytes: int | None = None

    @property
    def awake(self) -> EngineApi:
        """The engine. Raises `NotReadyError` while the model sleeps."""
        if self.engine is None or self.asleep:
            raise NotReadyError(f"model {self.source.model_id} (generation {self.generation}) sleeps: wake it first")
        return self.engine


class Models:
    """Owner of the engines; changed on the event loop only. The engine's thread runs what it is given.

    `newest` is the largest generation that was ever asked for.
    """

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self.published: Held | None = None
        self.newest = 0

    def all(self) -> list[Held]:
        """Every model, oldest first."""
        return list(self._held.values())

    def of(self, generation: int | None) -> Held:
        """The model that a call means. Raises `NotReadyError` naming what is held."""
        found = self.published if generation is None else self._held.get(generation)
        if found is None:
            named = "no model is published" if generation is None else f"generation {generation} is not held"
            raise NotReadyError(f"{named}; held: {', '.join(map(str, self._held)) or 'none'}")
        return found

    def check_health(self) -> None:
        """Ask the device and every cache; raises if one fails. In the engine's thread."""
        for held in self.all():
            if held.engine is not None:
                held.engine.health()

    def go_on_preparing(self) -> bool:
        """A small part of what the first steps did not wait for; False if nothing is left. In the engine's thread."""
        return any(held.engine is not None and held.engine.go_on_preparing() for held in self.all())

    def claim(self, generation: int) -> None:
        """Take a number for a model that will be loaded. Raises `RequestError` for one that is not new."""
        if generation <= self.newest:
            raise RequestError(f"generation: got {generation}, expected more than {self.newest}, the newest so far")
        self.newest = generation

    def add(self, held: Held) -> None:
        """Let calls that name it reach a model."""
        self.newest = max(self.newest, held.generation)
        self._held[held.generation] = held

    def publish(self, generation: int) -> int:
        """Let calls that name none reach it; the generation they reached before, 0 if none."""
        before = 0 if self.published is None else self.published.generation
        self.published = self.of(generation)
        return before

    def remove(self, generation: int) -> Held:
        """Let no call reach a model any more."""
        held = self.of(generation)
        del self._held[generation]
        if self.published is held:
            self.published = None
        return held


def named_generation(context: Any) -> int | None:
    """The generation in a call's metadata. Raises `RequestError` if it is no number."""
    for key, value in context.invocation_metadata() or ():
        if key == GENERATION_KEY:
            return generation_of(value)
    return None


def generation_of(value: str | bytes) -> int:
    """The number a metadata value stands for. Raises `RequestError`."""
    text = value if isinstance(value, str) else value.decode("latin-1")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RequestError(f"{GENERATION_KEY}: got {text!r}, expected a whole number")
    return int(text)
