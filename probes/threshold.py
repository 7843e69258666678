"""How many results in a row it takes to change a mind; pure counting."""

from __future__ import annotations


class Threshold:
    """The verdict on one check: bad after `failures` bad results in a row, good again after `successes` good ones."""

    def __init__(self, failures: int = 1, successes: int = 1) -> None:
        self._failures = failures
        self._successes = successes
        self._against = 0
        self.good = True

    def note(self, good: bool) -> bool:
        """Count one result; true if the verdict changed. A check that could not run is no result: do not note it."""
        if good is self.good:
            self._against = 0
            return False
        self._against += 1
        if self._against < (self._failures if self.good else self._successes):
            return False
        self._against = 0
        self.good = good
        return True
