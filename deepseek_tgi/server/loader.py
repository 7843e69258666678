"""Loads a model beside those that serve, in a thread of its own, and says how far it is.

Choice: a thread for each load, that ends with it. Prevents: a load that holds up the engine's thread, and memory that a
thread's kernels keep for their next call, which never comes. Nothing of a load can be reached before all of it is done;
one that fails, or is given up, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deepseek_tgi.adapters.hub import resolve_folder
from deepseek_tgi.config import ShardConfig
from deepseek_tgi.core import Request, SamplingParams, StopRule
from deepseek_tgi.engine.config import ModelFacts, WarmupResult
from deepseek_tgi.engine.memory import memory_of
from deepseek_tgi.errors import CheckpointError, ConfigError, DeepseekTgiError, ResourceError
from deepseek_tgi.server.engine_api import EngineApi
from deepseek_tgi.server.integrity import check_hashes, digest
from deepseek_tgi.server.loading import Count, Report, model_of, needed_bytes
from deepseek_tgi.server.models import Demand, Source

logger = logging.getLogger(__name__)

Load = Callable[[ShardConfig, Count, "Report | None"], EngineApi]
PROOF_TEXT = "The quick brown fox jumps over the lazy dog"
PROOF_TOKENS = 16
NICENESS = 5
"""Of the loading thread, below those that serve. It works in Python at times, and who waits for that waits longer the
nicer it is."""
Step = tuple[str, float]
"""A stage and how many percent of it are done."""


class GivenUpError(DeepseekTgiError):
    """Nobody waits for the load any more."""

    grpc_code = "CANCELLED"


class BrokenLoadError(DeepseekTgiError):
    """The loading thread was ended by something that is no error."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that has run, and can be added to the others."""

    engine: EngineApi
    facts: ModelFacts
    limits: WarmupResult
    folder: Path
    tokenizer_sha256: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How this process makes engines: its own options, with another model put in, and who counts their events."""

    config: ShardConfig
    load: Load
    count: Count

    def with_memory(self, kv_memory: int) -> Recipe:
        """The same with so many bytes of cache, 0 to measure."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, kv_memory=kv_memory))


class Loading:
    """One load, from its first stage to a `Loaded` or an error. Made and read on the event loop."""

    def __init__(self, recipe: Recipe, source: Source, demand: Demand, device: str) -> None:
        """`device` is where this process computes."""
        self._config = dataclasses.replace(
            recipe.config,
            model_id=source.model_id,
            revision=source.revision,
            quantize=source.quantize,  # what the process was started with is the first model's
            weights_cache_override=None,
        )
        self._source = source
        self._demand = demand
        self._device = device
        self._load = recipe.load
        self._count = recipe.count
        self._loop = asyncio.get_running_loop()
        self._steps: asyncio.Queue[Step | Loaded | BaseException] = asyncio.Queue()
        self._given_up = threading.Event()
        self.over = threading.Event()
        """Set once nothing of the load runs any more, whether or not somebody waits."""

    async def run(self, reserved_bytes: int) -> AsyncIterator[Step | Loaded]:
        """Stages as they come, and last the result. Raises what the load raises.

        Leaving early gives the load up: it ends at its next sign of progress. `reserved_bytes` is memory that was
        promised to others and not taken yet.
        """
        thread = threading.Thread(target=self._work, args=(reserved_bytes,), name="loader", daemon=True)
        thread.start()
        try:
            while True:
                step = await self._steps.get()
                if isinstance(step, BaseException):
                    raise step
                yield step
                if isinstance(step, Loaded):
                    return
        finally:
            self._given_up.set()

    def _work(self, reserved_bytes: int) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            loaded = self._loaded(reserved_bytes)
            if self._given_up.is_set():
                loaded.engine.close()
            else:
                self._tell(loaded)
        except BaseException as error:  # noqa: BLE001 - told to whoever waits, and raised there
            self._tell(self._told_apart(error))
        finally:
            self.over.set()

    def _loaded(self, reserved_bytes: int) -> Loaded:
        started = time.monotonic()
        self._stage("checking", 0.0)
        folder = resolve_folder(model_of(self._config), self._config.revision)
        if check_hashes(folder, self._source.manifest_sha256, lambda percent: self._stage("checking", percent)):
            logger.info("%s: every file is as its manifest says", folder)
        self._check_room(reserved_bytes)
        self._stage("loading", 0.0)
        engine = self._load(self._config, self._count, lambda percent: self._stage("loading", percent))
        try:
            facts = engine.facts()
            check_agreement(folder, facts, self._source)
            self._stage("proving", 0.0)
            limits = engine.warmup(
                [_proof()],
                self._demand.max_input_tokens,
                self._demand.max_prefill_tokens,
                self._demand.max_total_tokens,
                reserved_bytes=reserved_bytes,
            )
            self._stage("proving", 100.0)  # the last moment to give it up
        except BaseException:
            engine.close()
            raise
        seconds = time.monotonic() - started
        return Loaded(engine, engine.facts(), limits, folder, digest(folder / "tokenizer.json"), seconds)

    def _told_apart(self, error: BaseException) -> BaseException:
        """What is raised to who waits. An exit that somebody's code asked for in this thread is not the process's."""
        if isinstance(error, DeepseekTgiError):
            return error.with_traceback(None)  # frames of the error hold half a model
        if isinstance(error, Exception):
            return error
        return BrokenLoadError(f"{self._source.model_id}: loading broke off: {type(error).__name__}: {error}")

    def _check_room(self, reserved_bytes: int) -> None:
        """Raise `ResourceError` before anything is taken if the weights alone are too large."""
        needed = needed_bytes(self._config)
        available = memory_of(self._device, self._config.cuda_memory_fraction).available_bytes() - reserved_bytes
        if needed is not None and needed > available:
            raise ResourceError(
                f"{self._source.model_id}: its weights take {needed} bytes; {max(0, available)} are available beside "
                "the models that are loaded"
            )

    def _stage(self, name: str, percent: float) -> None:
        if self._given_up.is_set():
            raise GivenUpError(f"{self._source.model_id}: the load was given up while {name}")
        self._tell((name, percent))

    def _tell(self, step: Step | Loaded | BaseException) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._steps.put_nowait, step)


def check_agreement(folder: Path, facts: ModelFacts, source: Source) -> None:
    """Raise `CheckpointError` where tokenizer and weights cannot belong together, `ConfigError` for a broken wish."""
    if facts.tokenizer_size > facts.vocab_size:
        raise CheckpointError(
            f"{folder}: tokenizer.json has ids up to {facts.tokenizer_size - 1}, config.json says vocab_size "
            f"{facts.vocab_size}; expected a tokenizer of this model"
        )
    if strange := sorted(i for i in facts.eos_token_ids if not 0 <= i < facts.vocab_size):
        raise CheckpointError(f"{folder}: end tokens {strange} are no ids below vocab_size {facts.vocab_size}")
    if source.quantize is not None and not facts.quantization.startswith(source.quantize):
        raise ConfigError(f"quantize: got {source.quantize}, but {folder} is stored as {facts.quantization}")


def _proof() -> Request:
    return Request(0, PROOF_TEXT, PROOF_TOKENS, SamplingParams(), StopRule(2, ignore_eos=True))
