"""One model into the shards and to the requests, and out again: the steps that every plan of a change is made of.

Each leaves nothing behind if it fails: no model in memory that nobody will get, no blocks out of use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from deepseek_tgi.errors import DeepseekTgiError, NotReadyError
from deepseek_tgi.pb import control_pb2 as pb
from deepseek_tgi.router.change import Change, Stamp, Wish, files_of, stamp_of
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.control import ControlClient, Told
from deepseek_tgi.router.errors import ModelChangeError
from deepseek_tgi.router.models import Models
from deepseek_tgi.router.repository import Repository
from deepseek_tgi.router.served_model import ServedModel, Shared, idle, renamed
from deepseek_tgi.router.startup import facts_of

logger = logging.getLogger(__name__)

KEPT_BLOCKS = 1
"""Besides those of a longest request: what a shrunk cache keeps."""


class ModelLoads:
    """Owner of the models that leave; used on the event loop. `told` gives what hears how far a change is."""

    def __init__(
        self,
        shared: Shared,
        models: Models,
        control: ControlClient,
        generation: int,
        told: Callable[[Change], Told],
    ) -> None:
        """`generation` is the first model's."""
        self.repository = Repository(shared.config.model_repository)
        self.leaving: dict[asyncio.Task[None], ServedModel] = {}
        self._shared = shared
        self._models = models
        self._control = control
        self._generation = generation
        self._told = told
        self._stamps: dict[int, Stamp] = {}
        if models.current is not None:
            self._stamps[generation] = stamp_of(_folder(models.current))

    async def unchanged(self, model: ServedModel) -> bool:
        """True if the model's files are what they were when it was loaded."""
        known = None if model.generation is None else self._stamps.get(model.generation)
        return bool(known) and known == await asyncio.to_thread(stamp_of, _folder(model))

    async def loaded(self, wish: Wish, change: Change, known: RouterConfig | None = None) -> ServedModel:
        """A model that the shards hold and that nobody gets yet; a failure leaves nothing behind.

        `known` is how it was served before, if it was.
        """
        self._generation = max([self._generation, *(each.newest for each in await self._control.status())]) + 1
        generation = self._generation
        config = self._shared.config
        source = await self.repository.resolve(wish.model_id)
        request = pb.LoadRequest(
            generation=generation,
            source=pb.Source(
                model_id=source,
                revision=wish.revision,
                quantize=wish.quantize,
                manifest_sha256=wish.manifest_sha256,
            ),
            limits=pb.Limits(
                max_input_tokens=config.max_input_tokens,
                max_prefill_tokens=config.max_batch_prefill_tokens,
                max_total_tokens=config.max_total_tokens,
                max_batch_size=config.max_batch_size,
            ),
        )
        try:
            loaded = await self._control.load(request, self._told(change))
        except ModelChangeError as error:
            raise ModelChangeError(f"{error}{await self.repository.hint(wish.model_id)}", error.kind) from error
        except DeepseekTgiError:
            raise
        except Exception as error:
            raise _unforeseen(wish, error) from error
        try:
            named = known or renamed(config, loaded.folder, wish.model_id, wish.revision)
            files = await asyncio.to_thread(files_of, named, loaded)
            model = self._shared.model(named, facts_of(named, loaded), files, generation)
            self._stamps[generation] = await asyncio.to_thread(stamp_of, _folder(model))
            return model
        except BaseException as error:
            await self._undone(generation)
            if isinstance(error, ModelChangeError) or not isinstance(error, Exception):
                raise
            if isinstance(error, DeepseekTgiError | OSError):
                raise ModelChangeError(str(error)) from error
            raise _unforeseen(wish, error) from error

    async def _undone(self, generation: int) -> None:
        """Have the shards forget a model that nobody will get."""
        try:
            await self._control.unload(generation)
        except DeepseekTgiError as error:
            logger.error("generation %d could not be unloaded: %s", generation, error)

    async def publish(self, model: ServedModel, change: Change) -> None:
        """Let a model that was loaded take the requests. If that cannot be it is unloaded, and whoever served does."""
        assert model.generation is not None
        try:
            await self._control.publish(model.generation)
        except BaseException:
            model.close()
            await self._undone(model.generation)
            raise
        self._models.publish(model)
        change.generation = model.generation
        logger.info("%s (generation %d) takes the requests, by the plan %s", model.name, model.generation, change.plan)

    def retire(self, model: ServedModel) -> None:
        """Unload a model once nobody uses it any more."""

        async def retire() -> None:
            try:
                await idle(model, None)
                await self.gone(model)
            except DeepseekTgiError as error:
                logger.error("%s could not be unloaded: %s", model.name, error)

        task = asyncio.create_task(retire(), name=f"retiring {model.name}")
        self.leaving[task] = model
        task.add_done_callback(lambda done: self.leaving.pop(done, None))

    async def gone(self, model: ServedModel) -> None:
        """Give up a model that nobody uses, here and in the shards."""
        assert model.generation is not None
        self._stamps.pop(model.generation, None)
        model.scheduler.end_all(NotReadyError(f"{model.name} was given up"))  # whoever waits for it all the same
        self._models.drop(model)
        freed = await self._control.unload(model.generation)
        logger.info("%s (generation %d) is unloaded, %d bytes are free", model.name, model.generation, freed)

    async def until_idle(self, model: ServedModel, change: Change) -> None:
        """Wait until nobody uses a model, nor those that it followed: without any the shards run no step.

        Raises `ModelChangeError`, and lets it serve on, if that takes too long.
        """
        loop, seconds = asyncio.get_running_loop(), self._shared.config.drain_timeout
        deadline = loop.time() + seconds
        self._told(change)("draining", 0.0)
        if self.leaving:
            await asyncio.wait(set(self.leaving), timeout=seconds)
        if self.leaving or not await idle(model, max(0.0, deadline - loop.time())):
            used = [each for each in (*self.leaving.values(), model) if each.traffic.active] or [model]
            left, names = sum(each.traffic.active for each in used), " and ".join(each.name for each in used)
            self._models.resume()
            raise ModelChangeError(f"{left} requests of {names} still run after {seconds:g} s; {model.name} serves on")

    async def shrink(self, model: ServedModel) -> list[int]:
        """Take the free blocks of a model's cache out of use and give their memory back."""
        blocks, longest = model.scheduler.blocks, model.state.limits.max_total_tokens
        if blocks is None or model.generation is None:
            return []
        withheld = blocks.withhold(blocks.blocks_for(longest) + KEPT_BLOCKS)
        try:
            freed = await self._control.discard(model.generation, withheld)
        except BaseException:
            blocks.restore(withheld)
            raise
        logger.info("%d free blocks of %s are given back, %d bytes", len(withheld), model.name, freed)
        return withheld

    async def grow(self, model: ServedModel, withheld: list[int]) -> None:
        """Take back what `shrink` gave away."""
        if model.scheduler.blocks is not None and model.generation is not None:
            await self._control.discard(model.generation, [])
            model.scheduler.blocks.restore(withheld)


def _folder(model: ServedModel) -> Path:
    return Path(model.state.config.tokenizer_name)


def _unforeseen(wish: Wish, error: Exception) -> ModelChangeError:
    """A load that broke in a way nobody thought of has failed like any other: what served must serve on."""
    logger.error("loading %s broke", wish.model_id, exc_info=error)
    return ModelChangeError(f"{wish.model_id}: loading broke: {type(error).__name__}: {error}")
