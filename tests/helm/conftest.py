"""The helms that the chart is held to."""

from __future__ import annotations

import pytest
from helm_chart import newest
from peers import HELMS


def _skip(name: str) -> None:
    pytest.skip(f"{name} is absent: `python -m tests.peers` fetches it")


@pytest.fixture(params=sorted(HELMS))
def helm(request: pytest.FixtureRequest) -> str:
    """Each version in turn."""
    name: str = request.param
    if not HELMS[name].ready:
        _skip(name)
    return name


@pytest.fixture(scope="session")
def any_helm() -> str:
    """One version, where all give the same."""
    name = newest()
    if name is None:
        _skip("helm")
        raise AssertionError
    return name
