"""`/admin/models…`: what is served, and changing it. These routes exist only where a token is set, and ask for it.

A change goes on if the client that asked for it leaves; `GET /admin/models` tells how far it is.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.probes.state import State
from deepseek_tgi.router import sse
from deepseek_tgi.router.change import PLANS, Change, Wish
from deepseek_tgi.router.errors import PlainError
from deepseek_tgi.router.fields import Fields, boolean, string
from deepseek_tgi.router.http import Exchange, Handler
from deepseek_tgi.router.model_changes import ModelChanges
from deepseek_tgi.router.served_model import ServedModel
from deepseek_tgi.router.state import RouterState

SHOWN_CHANGES = 10
STREAM = "stream"
WISHES = ("revision", "quantize", "manifest_sha256")


class AdminApi:
    """Handlers of the admin routes."""

    def __init__(self, state: RouterState, changes: ModelChanges, token: str) -> None:
        self._state = state
        self._changes = changes
        self._authorization = f"Bearer {token}".encode()

    def table(self) -> dict[tuple[str, str], Handler]:
        """Method and path to handler."""
        return {
            ("GET", "/admin/models"): self._guarded(self.models),
            ("POST", "/admin/models/load"): self._guarded(self.load),
            ("POST", "/admin/models/unload"): self._guarded(self.unload),
            ("POST", "/admin/models/sleep"): self._guarded(self.sleep),
            ("POST", "/admin/models/wake"): self._guarded(self.wake),
        }

    async def models(self, exchange: Exchange) -> None:
        """GET /admin/models: what is served, what could be, what goes on and what was."""
        await exchange.respond_json(200, self._shown(await self._changes.repository.names()))

    async def load(self, exchange: Exchange) -> None:
        """POST /admin/models/load: serve another model; with `stream`, events tell how far it is."""
        fields = await self._fields(exchange, "LoadModelRequest", "model_id", *WISHES, "plan")
        plan = fields.optional("plan", string) or "auto"
        if plan not in PLANS:
            raise PlainError(422, f"plan: got {plan!r}, expected one of {', '.join(PLANS)}")
        wish = Wish(
            model_id=fields.required("model_id", string),
            plan=plan,
            **{name: fields.optional(name, string) for name in WISHES},
        )
        await self._answer(exchange, self._changes.load(wish), fields)

    async def unload(self, exchange: Exchange) -> None:
        """POST /admin/models/unload: serve nothing."""
        fields = await self._fields(exchange, "UnloadModelRequest", "model_id")
        await self._answer(exchange, self._changes.unload(fields.optional("model_id", string)), fields)

    async def sleep(self, exchange: Exchange) -> None:
        """POST /admin/models/sleep: give memory back until the model is woken."""
        fields = await self._fields(exchange, "SleepModelRequest", "drop_weights", "keep_pages")
        drop, keep = (fields.optional(name, boolean) or False for name in ("drop_weights", "keep_pages"))
        if drop and keep:
            raise PlainError(422, "keep_pages: got drop_weights too; pages are of no use without the weights' engine")
        await self._answer(exchange, self._changes.sleep(drop, keep), fields)

    async def wake(self, exchange: Exchange) -> None:
        """POST /admin/models/wake: serve again."""
        fields = await self._fields(exchange, "WakeModelRequest")
        await self._answer(exchange, self._changes.wake(), fields)

    async def _fields(self, exchange: Exchange, type_name: str, *known: str) -> Fields:
        """What the body wishes; none is as good as an empty one. Checked whole before anything begins.

        A misspelt wish is refused: a model whose hash was to be checked must not be loaded unchecked.
        """
        body = await exchange.json(self._state.config.payload_limit, optional=True)
        fields = Fields(body, "", type_name)
        fields.only(*known, STREAM)
        fields.optional(STREAM, boolean)
        return fields

    async def _answer(self, exchange: Exchange, work: Coroutine[Any, Any, Change], fields: Fields) -> None:
        streamed = fields.optional(STREAM, boolean) or False
        task = self._changes.start(work)
        if not streamed:
            await exchange.respond_json(200, asdict(await asyncio.shield(task)))
            return
        await asyncio.sleep(0)  # the change begins, or is refused
        change = self._changes.running
        if change is None or task.done():
            await exchange.respond_json(200, asdict(await task))
            return
        await exchange.start_stream()
        async for step in self._changes.follow(change):
            await exchange.write(sse.event(asdict(step)))
        await exchange.end_stream()

    def _shown(self, available: list[str]) -> dict[str, Any]:
        changes, models = self._changes, self._changes.models
        current = models.current
        running = changes.running
        return {
            "serving": None
            if current is None
            else {
                "model_id": current.name,
                "generation": current.generation,
                "revision": current.state.config.revision,
                "state": self._condition(current),
                "max_input_tokens": current.state.limits.max_input_tokens,
                "max_total_tokens": current.state.limits.max_total_tokens,
                "requests": current.traffic.active,
            },
            "held_requests": models.held,
            "available": available,
            "change": None if running is None else asdict(running),
            "history": [asdict(change) for change in changes.history[-SHOWN_CHANGES:] if change is not running],
        }

    def _condition(self, model: ServedModel) -> str:
        """Of the served model; as every probe says where it takes requests."""
        if self._changes.asleep is model:
            return State.SLEEPING.value
        return self._state.owner.state.value if self._changes.models.open is model else "held"

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(exchange: Exchange) -> None:
            given = (exchange.header("authorization") or "").encode("latin-1")
            if not hmac.compare_digest(given, self._authorization):
                raise PlainError(401, "expected `authorization: Bearer TOKEN`, with the admin token")
            try:
                await handler(exchange)
            except DeepseekTgiError:
                if exchange.started:  # the stream has told it
                    return
                raise

        return guarded
