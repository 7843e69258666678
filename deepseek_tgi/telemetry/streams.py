"""The three standard descriptors of a process of ours."""

from __future__ import annotations

import os


def open_standard_streams() -> None:
    """Point closed ones at /dev/null: else a socket of ours would get the number, and log lines or stdin with it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
