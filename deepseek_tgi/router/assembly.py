"""Putting the door together: every part gets what it needs here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deepseek_tgi.probes.grpc_health import Directory
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.state import Event
from deepseek_tgi.router.admin_api import AdminApi
from deepseek_tgi.router.app import RouterApp
from deepseek_tgi.router.client import ShardClient
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.router.control import ControlClient
from deepseek_tgi.router.http import Handler
from deepseek_tgi.router.model_changes import ModelChanges
from deepseek_tgi.router.model_files import ModelFiles
from deepseek_tgi.router.model_state import GRPC_SERVICES, ModelState
from deepseek_tgi.router.models import Models
from deepseek_tgi.router.routes import route_table
from deepseek_tgi.router.scheduler import Scheduler
from deepseek_tgi.router.served_model import Shared
from deepseek_tgi.router.startup import ShardFacts
from deepseek_tgi.router.state import RouterState


@dataclass(frozen=True, slots=True)
class Router:
    """The parts that a process (or a test) starts and stops; `models.run()` must be kept running.

    `changes` is None where the shards cannot change their model.
    `state` is the first model's; whatever it shares with later ones (metrics, traffic) stays right.
    """

    app: RouterApp
    models: Models
    changes: ModelChanges | None
    state: RouterState
    owner: Owner
    directory: Directory
    table: Mapping[tuple[str, str], Handler]

    @property
    def scheduler(self) -> Scheduler:
        """Of the model that serves."""
        assert self.models.current is not None, "no model is loaded"
        return self.models.current.scheduler

    def close(self) -> None:
        """Stop the validation threads."""
        self.models.close()


def assemble(
    config: RouterConfig,
    shards: ShardClient,
    facts: ShardFacts,
    files: ModelFiles,
    *,
    generation: int | None = None,
    owner: Owner | None = None,
    directory: Directory | None = None,
) -> Router:
    """Build the door for shards that were introduced already and hold the model as `generation`.

    `owner` is the state that the door shows; None: of a door that is ready. `directory` is where it is shown by name.
    """
    shared = Shared.made_for(config, shards, facts, owner or _ready_owner(config.model_id))
    first = shared.model(config, facts, files, generation)
    directory = directory or Directory(shared.owner, *GRPC_SERVICES)
    model_state = ModelState(shared.owner, directory, first.name)
    models = Models(first, config.hold_timeout, config.max_concurrent_requests, model_state)
    changes = None
    table = route_table(first.state, models)
    if generation is not None:
        changes = ModelChanges(shared, models, ControlClient(shards.channels), generation)
        if config.admin_token is not None:
            table |= AdminApi(first.state, changes, config.admin_token).table()
    return Router(RouterApp(first.state, table), models, changes, first.state, shared.owner, directory, table)


def _ready_owner(model: str) -> Owner:
    owner = Owner()
    owner.apply(Event.LOAD, model=model)
    owner.apply(Event.LOADED)
    owner.apply(Event.WARMED)
    return owner
