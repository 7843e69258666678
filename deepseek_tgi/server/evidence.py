"""How a shard is judged: its engine's thread, its event loop, its device, and how its steps end.

A step that broke (no error of ours: the model itself raised) makes the shard DEGRADED at once; one that ended with
`GenerationError` may have been its own request's fault, so one token is generated first. Every step that ends well
proves that steps work; where none comes, the one-token generation does.
"""

from __future__ import annotations

from deepseek_tgi.errors import DeepseekTgiError, DeviceError, GenerationError, ResourceError
from deepseek_tgi.probes.checks import Check
from deepseek_tgi.probes.loop_pulse import watch_loop
from deepseek_tgi.probes.monitor import Monitor, MonitorLimits
from deepseek_tgi.probes.owner import Owner
from deepseek_tgi.probes.thread_watch import ThreadWatch
from deepseek_tgi.server.engine_thread import EngineThread
from deepseek_tgi.server.service import ShardService

GENERATION = "generation"
DEVICE = "device"
DEVICE_PERIOD_S = 2.0
ANSWER_S = 10.0
"""An answer later than this came from a busy thread, or will not come; either is seen elsewhere."""
PROOF_PERIOD_S = 0.5


def monitor_of(owner: Owner, thread: EngineThread, service: ShardService, limits: MonitorLimits) -> Monitor:
    """A monitor of one shard; made on its event loop, not started yet."""
    checks = (
        Check(DEVICE, service.check_device, DEVICE_PERIOD_S, ANSWER_S, failures=2),
        Check(GENERATION, service.prove, PROOF_PERIOD_S, ANSWER_S, only_when_bad=True),
    )
    engine = ThreadWatch("engine", thread.progress, thread.send_noop)
    return Monitor(owner, (engine, watch_loop()), checks, limits)


class StepEvidence:
    """Tells a monitor how steps end."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def worked(self) -> None:
        """A step ended well."""
        self._monitor.content(GENERATION)

    def failed(self, error: Exception) -> None:
        """A step ended with `error`; what a request did wrong is no evidence."""
        if not isinstance(error, DeepseekTgiError) or isinstance(error, (ResourceError, DeviceError)):
            self._monitor.complain(GENERATION, f"a step failed: {error or type(error).__name__}")
        elif isinstance(error, GenerationError):
            self._monitor.suspect(GENERATION)
