"""The guard itself: what it must catch and what it must let pass."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import sys
sys.path.insert(0, {folder!r})
from process_guard import ProcessGuard

def pytest_configure(config):
    config.pluginmanager.register(ProcessGuard())
"""

BODY = """
import os
import subprocess
import pytest

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()

def test_tidy():
    subprocess.run(["true"])

def test_uses_a_server(server):
    assert server.poll() is None

def test_closes_stdin():
    os.close(0)

def test_leaves_an_orphan():
    subprocess.run("sleep 60 >/dev/null 2>&1 &", shell=True)
"""


def test_guard_names_the_tests_that_left_something_wrong(pytester: pytest.Pytester) -> None:
    folder = str(__file__).rsplit("/unit/", 1)[0]
    pytester.makeconftest(CONFTEST.format(folder=folder))
    pytester.makepyfile(BODY)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(["*test_closes_stdin closed stdin, which every later child inherits"])
    result.stdout.fnmatch_lines(["*test_leaves_an_orphan left running: * sleep 60*"])
