"""Whether the shard is alive: one flag, cleared by any failed generation and proved again by a one-token generation."""

from __future__ import annotations

import logging
from collections.abc import Callable

from deepseek_tgi.core import HEALTH_REQUEST_ID
from deepseek_tgi.pb import generate_pb2 as pb
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.errors import ShardError

logger = logging.getLogger(__name__)

DUMMY_TIMEOUT_S = 60.0
"""The dummy generation waits behind the step that runs, which may be a long prefill: slow is not dead."""


class Liveness:
    """Owner of the flag. Load does not touch it: a full queue is not a sick shard."""

    def __init__(self, shards: ShardClient) -> None:
        self._shards = shards
        self.healthy = True
        self.on_suspect: Callable[[], None] | None = None

    def suspect(self) -> None:
        """A generation failed: the next check generates instead of asking. Tells `on_suspect`."""
        self.healthy = False
        if self.on_suspect is not None:
            self.on_suspect()

    async def prove(self) -> None:
        """Let the shard generate one token. Raises `ShardError` if it does not."""
        await self._shards.prefill(liveness_batch(), timeout=DUMMY_TIMEOUT_S)

    async def check(self, may_generate: bool = True) -> bool:
        """Ask the shard, or let it generate one token if the last news was bad.

        Where no model takes requests there is none that could: then the shard is asked, and the bad news stands.
        """
        try:
            if self.healthy or not may_generate:
                await self._shards.health()
            else:
                await self.prove()
        except ShardError as error:
            logger.error("the shard is not healthy: %s", error)
            self.healthy = False
            return False
        if may_generate:
            self.healthy = True
        return True


def liveness_batch() -> pb.Batch:
    """One greedy token for a one-token prompt, stored in the reserved block 0."""
    request = pb.Request(
        id=HEALTH_REQUEST_ID,
        inputs="liveness",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text="liveness")]),
        truncate=1,
        add_special_tokens=False,
        parameters=pb.NextTokenChooserParameters(
            temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, frequency_penalty=0.0
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
        blocks=[0],
        slots=[0],
    )
    return pb.Batch(id=HEALTH_REQUEST_ID, requests=[request], size=1, max_tokens=2, max_blocks=1)
