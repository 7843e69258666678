"""What becomes of the served model, as events of the state that the probes show."""

from __future__ import annotations

from deepseek_tgi.probes.grpc_health import Directory
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event, State

GRPC_SERVICES = ("fmaas.GenerationService", "inference.GRPCInferenceService", "generate.v3.TextGenerationService")
"""Names under which health is asked for, besides the model's own and the empty one of the whole server."""


class ModelState:
    """Tells an owner; used on the event loop. What a state does not admit (the process leaves) changes nothing.

    `directory` has the served model under its name, beside the services.
    """

    def __init__(self, owner: Owner, directory: Directory, name: str) -> None:
        """`name` is the first model's."""
        self._owner = owner
        self._directory = directory
        self._name = name
        directory.put(name, owner)

    def serves(self, name: str, generation: int | None) -> None:
        """From now on new requests go to this model."""
        if name != self._name:
            self._directory.remove(self._name)
        self._name = name
        self._directory.put(name, self._owner)
        if self._owner.apply(Event.SWAPPED, model=name, generation=generation):
            return
        if self._owner.apply(Event.KEEP, model=name, generation=generation):
            return
        self._owner.apply(Event.LOAD)
        self._owner.apply(Event.LOADED)
        self._owner.apply(Event.WARMED, model=name, generation=generation)

    def waits(self) -> None:
        """From now on new requests wait: a model makes room, loads or wakes."""
        if self._owner.state is State.SLEEPING:
            self._owner.apply(Event.WAKE)
        else:
            self._owner.apply(Event.LOAD)

    def is_loading(self, stage: str, percent: float) -> None:
        """How far it is."""
        if self._owner.state is State.LOADING:
            self._owner.apply(Event.PROGRESS, stage=stage, percent=percent)

    def refuses(self, reason: str) -> None:
        """From now on new requests are refused: the model leaves, or none could be loaded."""
        if not self._owner.apply(Event.LOAD_FAILED, reason=reason):
            self._owner.apply(Event.UNLOAD, reason=reason)

    def gone(self) -> None:
        """The served model has been given up; where another is on its way nothing changes."""
        if self._owner.apply(Event.UNLOADED):
            self._directory.remove(self._name)

    def sleeps(self) -> None:
        """The served model waits to be woken."""
        self._owner.apply(Event.SLEPT)
