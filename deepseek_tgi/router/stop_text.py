"""Text that may end in a stop sequence, shown as it comes without ever showing what must be left out."""

from __future__ import annotations


class StopText:
    """Gives out pieces; where stop sequences are to be left out, keeps back what may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...], keeps_stop: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keeps_stop = keeps_stop
        self._text = ""
        self._shown = 0
        self.found = ""

    def feed(self, piece: str) -> str:
        """Take a piece of text; what may be shown now."""
        self._text += piece
        end = len(self._text)
        if not self._keeps_stop and self._stops:
            end -= max(self._beginning(stop) for stop in self._stops)
        return self._until(end)

    def finish(self, text: str) -> str:
        """`text` is all there was: the rest of it, without the stop sequence it ends with if so wished."""
        found = [stop for stop in self._stops if text.endswith(stop)]
        if not found:
            found = [stop for stop in self._stops if stop in text]
        self.found = max(found, key=len, default="")
        self._text = text
        end = len(text)
        if self.found and not self._keeps_stop:
            end = text.rindex(self.found)
        return self._until(end)

    def rest(self) -> str:
        """What was kept back, where no end will come."""
        return self._until(len(self._text))

    def _until(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _beginning(self, stop: str) -> int:
        """Characters at the end of the text that are the beginning of `stop`."""
        for length in range(min(len(stop), len(self._text)), 0, -1):
            if self._text.endswith(stop[:length]):
                return length
        return 0
