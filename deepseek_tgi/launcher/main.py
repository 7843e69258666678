"""`text-generation-launcher`: the order of work from the command line to the last child's end."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from deepseek_tgi import __version__
from deepseek_tgi.adapters.hub import DEMO_MODEL_ID, SMALL_MODEL_ID, resolve_folder
from deepseek_tgi.config import DEFAULT_BACKEND, LauncherConfig, read
from deepseek_tgi.errors import DeepseekTgiError
from deepseek_tgi.launcher import download, handover, kernels, router, shards
from deepseek_tgi.launcher.check import check_doors, check_options, check_port, check_shards, given_without_effect
from deepseek_tgi.launcher.model_facts import (
    attention_environment,
    cuda_major,
    local_folder,
    model_folder,
    num_shards,
    prefill_tokens,
    read_facts,
)
from deepseek_tgi.launcher.process import Child
from deepseek_tgi.launcher.shards import Plan
from deepseek_tgi.options import Program
from deepseek_tgi.registry import RESERVED, find_backend
from deepseek_tgi.server.sockets import check_path, rank_path, remove_stale
from deepseek_tgi.telemetry import log

logger = logging.getLogger(__name__)

PROGRAM = Program(
    "text-generation-launcher",
    "Serve a model: shards of a backend, and an HTTP router in front of them.",
    "--backend NAME --model-id MODEL [options]",
    f"""example:
  text-generation-launcher --backend {DEFAULT_BACKEND} --port 3000   # serves the bundled demo model

Without --backend, or with --backend tgi, TGI's own launcher is run with the same options.
`deepseek-tgi launch` is this program with --backend {DEFAULT_BACKEND} filled in.
Exit codes: 0 stopped by a signal, 1 a child failed, 2 wrong options, 3 unreadable model, 4 unsupported model,
5 memory, disk, port or socket missing, 128+n stopped at once by a second signal n.""",
)


AFTER_FAILURE_S = 5.0
"""What the other children get once one has ended: nothing that was asked of them can be completed."""
ECHO_S = 0.2
"""The same signal again this soon is one request heard twice: `timeout` signals its child and then its own group."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP: the first asks to finish, a second to leave at once. Owned by the main thread."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._noted_at = -math.inf

    def install(self) -> None:
        """Replace the default handlers, and make sure that the ends of children are told."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asks to outlive the terminal
            signal.signal(signal.SIGHUP, self.note)
        # A parent that ignores it hands that on, and the kernel then forgets how our children ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        before, self._noted_at = self._noted_at, time.monotonic()
        if self._noted_at - before >= ECHO_S or number != self.received[-1]:
            self.received.append(number)

    def stopping(self) -> bool:
        """True once asked."""
        return bool(self.received)

    def hurry(self) -> bool:
        """True once asked twice."""
        return len(self.received) > 1


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(arguments, os.environ)
    except DeepseekTgiError as error:
        if log.configured():
            logger.error("%s", error)
        else:
            sys.stderr.write(f"{PROGRAM.name}: error: {str(error).removeprefix(f'{PROGRAM.name}: ')}\n")
        return error.exit_code


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Decide who serves, and serve. Raises the taxonomy's errors."""
    tgi_wanted = handover.wanted_backend(argv, environ) == RESERVED
    asks = {"--help", "-h", "--version", "-V"} & set(argv)
    if tgi_wanted and not (asks and handover.find_tgi(environ.get("PATH", os.defpath)) is None):
        handover.hand_over(argv, environ)
    if {"--version", "-V"} & set(argv):
        sys.stdout.write(f"text-generation-launcher (deepseek-tgi {__version__})\n")
        return 0
    resolved = read(LauncherConfig, PROGRAM, argv, environ)
    config: LauncherConfig = resolved.config
    log.configure("tracing" if config.json_output else "plain", config.log_level, environ)
    if config.env:
        logger.info("deepseek-tgi %s, Python %s, %s", __version__, sys.version.split()[0], sys.platform)
    signals = StopSignals()
    signals.install()
    check(config, environ)
    stock = router.stock_router(config, environ.get("PATH")) is not None
    if ignored := given_without_effect(resolved.origins, stock):
        whose = "on this backend behind TGI's own router" if stock else "on this backend"
        logger.warning("Without effect %s: %s", whose, ", ".join(ignored))
    compiling = kernels.start(config, environ)
    try:
        model = config.weights_cache_override or prepared_model(config.model_id, environ, signals)
        return launch(config, model, environ, signals) if model is not None else 0
    finally:
        if compiling is not None:
            stop(compiling, 0.0, signals)


def check(config: LauncherConfig, environ: Mapping[str, str]) -> None:
    """Refuse what cannot work before any process starts."""
    find_backend(config.backend)
    check_options(config)
    stock = router.stock_router(config, environ.get("PATH"))
    check_doors(config, stock is not None)
    if num_shards(config) > 1:
        check_port(config.master_addr, config.master_port, "--master-port")
    for rank in range(num_shards(config)):
        check_path(rank_path(config.shard_uds_path, rank))


def prepared_model(model_id: str, environ: Mapping[str, str], signals: StopSignals) -> str | None:
    """`model_id`, or the folder that one of our own names stands for; None if asked to stop meanwhile."""
    if model_id == DEMO_MODEL_ID:
        return str(resolve_folder(model_id))
    if model_id != SMALL_MODEL_ID or local_folder(model_id) is not None:
        return model_id
    folder = download.small_model(environ, signals.stopping)
    return None if folder is None else str(folder)


def make_plan(config: LauncherConfig, model: str, environ: Mapping[str, str]) -> Plan:
    """Everything that follows from the options and the model's config, as far as that is on this machine."""
    folder = model_folder(model, config.revision, environ)
    check_shards(folder, config.backend, num_shards(config))
    facts = read_facts(folder)
    exported = attention_environment(facts, config.lora_adapters is not None, cuda_major(), environ)
    return Plan(
        config=config,
        model=model,
        served_name=config.model_id,
        num_shards=num_shards(config),
        quantize=config.quantize or facts.quant_method,
        max_batch_prefill_tokens=prefill_tokens(config, facts),
        environ={**environ, **exported},
        # TGI's router has no such port: there each rank answers for itself.
        shard_probe_port=config.probe_port if router.stock_router(config, environ.get("PATH")) is not None else 0,
    )


def launch(config: LauncherConfig, model: str, environ: Mapping[str, str], signals: StopSignals) -> int:
    """Run all children until a signal (0) or until one of them ends (raises); stops them all, router first."""
    plan = make_plan(config, model, environ)
    paths = [rank_path(config.shard_uds_path, rank) for rank in range(plan.num_shards)]
    children: list[Child] = []
    allowed_s: float = config.graceful_termination_timeout
    try:
        if download.run(plan, signals.stopping):
            # Once more: a model of the hub may have been fetched just now.
            _run_children(make_plan(config, model, environ), children, paths, signals)
    except BaseException:
        allowed_s = min(allowed_s, AFTER_FAILURE_S)
        raise
    finally:
        for child in children:
            stop(child, allowed_s, signals)
        for path in paths:
            remove_stale(path)
    return 128 + signals.received[1] if signals.hurry() else 0


def _run_children(plan: Plan, children: list[Child], paths: list[str], signals: StopSignals) -> None:
    """Start ranks, then the router, into `children` in the order to stop them; return when asked, raise if one ends."""
    for path in paths:
        remove_stale(path)
    for rank in range(len(paths)):
        children.append(shards.start(plan, rank))
    ranks = list(children)
    stock = router.stock_router(plan.config, plan.environ.get("PATH"))
    if stock is None:  # ours tells how far the shards are
        children.insert(0, router.start(plan, None))
    if not shards.wait_ready(plan, ranks, children, signals.stopping):
        return
    if stock is not None:
        children.insert(0, router.start(plan, stock))
    while not signals.stopping():
        shards.check_alive(children, "failed")
        time.sleep(shards.POLL_S)


def stop(child: Child, timeout_s: float, signals: StopSignals) -> None:
    """SIGTERM and `timeout_s` to finish in, then SIGKILL to its group; at once after a second signal.

    A child that gets no time is no longer needed: nobody is warned of it.
    """
    if child.exit_code() is not None:
        return
    logger.info("Terminating %s", child.spec.name)
    child.terminate()
    if not child.wait(timeout_s + child.spec.closing_s, hurry=signals.hurry):
        if timeout_s or signals.hurry():
            why = "was asked to hurry" if signals.hurry() else "did not end in time"
            logger.warning("%s %s: killed", child.spec.name, why)
        child.kill()
        child.wait(10.0)


if __name__ == "__main__":
    sys.exit(main())
