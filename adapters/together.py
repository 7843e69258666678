"""What an error means to work that other ranks are in."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from deepseek_tgi.errors import DeviceError

if TYPE_CHECKING:
    from deepseek_tgi.adapters.parallel import RankGroup


class Together:
    """See `RankGroup.together`."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        """Refuse if a rank is lost: a recorded step asks nobody."""
        self._group.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Turn any error into a fatal one."""
        if error is None or isinstance(error, DeviceError):
            return
        reason = self._group.lost  # of what a lost rank did not bring, models make no numbers
        if reason is None:
            reason = f"rank {self._group.rank}: a step failed that other ranks are in: {type(error).__name__}: {error}"
        self._group.break_up(reason)
        raise DeviceError(reason) from error
