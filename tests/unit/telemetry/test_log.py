"""Log lines as their readers parse them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepseek_tgi.config import LauncherConfig
from deepseek_tgi.options import options_of
from deepseek_tgi.router.config import RouterConfig
from deepseek_tgi.telemetry import log

ALLOWED = {"TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL"}
Capture = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def capture() -> Iterator[Capture]:
    """Configure logging onto a pipe; the result reads the lines written so far. Logging is put back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("deepseek_tgi")
    saved = (root.handlers[:], root.level, ours.level)
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)

    def start(form: str, level: str = "info", **environ: str) -> Callable[[], list[str]]:
        log.configure(form, level, environ, write_end)

        def lines() -> list[str]:
            data = b""
            while True:
                try:
                    data += os.read(read_end, 1 << 20)
                except BlockingIOError:
                    return data.decode().splitlines()

        return lines

    yield start
    logging.captureWarnings(False)
    root.handlers[:], root.level, ours.level = saved[0], saved[1], saved[2]
    root.manager._clear_cache()  # type: ignore[attr-defined]
    os.close(read_end)
    os.close(write_end)


logger = logging.getLogger("deepseek_tgi.test")


@pytest.mark.parametrize("level", [log.TRACE, 10, 20, 30, 40, 50])
def test_a_shard_line_is_what_the_launcher_parses(level: int, capture: Capture) -> None:
    lines = capture("shard", "trace")
    logger.log(level, "loaded %d tensors\nof two lines", 3)
    (line,) = lines()
    parsed = json.loads(line)
    assert parsed["text"] == "loaded 3 tensors\nof two lines"
    assert parsed["record"]["level"]["name"] in ALLOWED


@pytest.mark.parametrize("text", ["x" * 100_000, "\u4f60\U0001f600" * 20_000, '"\\\n' * 30_000, "\x00" * 9000])
def test_a_shard_line_never_exceeds_what_a_pipe_writes_at_once(text: str, capture: Capture) -> None:
    lines = capture("shard")
    logger.info("%s", text)
    (line,) = lines()
    assert len(line.encode()) + 1 <= 4096
    assert json.loads(line)["text"].endswith("(cut)")
    assert len(line) > 1000


def test_one_line_is_one_write(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    capture("shard")
    writes: list[bytes] = []

    def write(_fd: int, data: bytes) -> int:
        writes.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", write)
    logger.info("first")
    logger.info("second")
    assert [data.count(b"\n") for data in writes] == [1, 1]


def test_a_tracing_line_has_the_keys_of_rusts_tracing(capture: Capture) -> None:
    lines = capture("tracing")
    logger.warning("careful", extra={"fields": {"rank": 1}})
    parsed: dict[str, Any] = json.loads(lines()[0])
    assert parsed["level"] == "WARN"
    assert parsed["fields"] == {"message": "careful", "rank": 1}
    assert parsed["target"] == "deepseek_tgi::test"
    assert parsed["timestamp"].endswith("Z")


def test_a_plain_line_is_readable(capture: Capture) -> None:
    lines = capture("plain")
    logger.error("it broke", extra={"fields": {"rank": 0}})
    assert lines()[0].endswith("ERROR deepseek_tgi.test: it broke rank=0")


def test_nothing_in_a_plain_line_forges_another_or_commands_the_terminal(capture: Capture) -> None:
    forged = "2026-01-01T00:00:00.000000Z  INFO deepseek_tgi: all is well"
    lines = capture("plain")
    logger.error("no model %s", f"a\0\x1b[2J\x9b1m\r\n{forged}\ttab")
    first, second = lines()
    assert first.endswith(r"no model a\x00\x1b[2J\x9b1m\x0d")
    assert second == f"  {forged}\ttab"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("OFF", ""), ("ERROR", "E"), ("WARN", "EW"), ("INFO", "EWI"), ("DEBUG", "EWID"), ("TRACE", "EWIDT"),
     ("error,text_generation_router=debug", "E"), ("some_crate=trace", "EWI")],
)  # fmt: skip
def test_levels_of_both_worlds(name: str, shown: str, capture: Capture) -> None:
    lines = capture("plain", name)
    for level, letter in ((40, "E"), (30, "W"), (20, "I"), (10, "D"), (log.TRACE, "T")):
        logger.log(level, "%s", letter)
    assert "".join(line[-1] for line in lines()) == shown


def test_tokens_and_keys_never_reach_a_line(capture: Capture) -> None:
    lines = capture("shard", HF_TOKEN="hf_abcdefgh12345", API_KEY="key-of-the-house")
    logger.info("fetching with hf_abcdefgh12345 and %s", "key-of-the-house")
    assert json.loads(lines()[0])["text"] == "fetching with *** and ***"


@pytest.mark.parametrize("config", [LauncherConfig, RouterConfig])
def test_no_option_that_is_declared_a_secret_reaches_a_line(config: type, capture: Capture) -> None:
    declared = {name: spec for name, spec in options_of(config).items() if spec.secret}
    values = {env: f"the-{name}-itself" for name, spec in declared.items() for env in spec.env}
    assert "DEEPSEEK_TGI_ADMIN_TOKEN" in values
    lines = capture("plain", **values)
    logging.getLogger("deepseek_tgi.test").info("got %s", " ".join(values.values()))
    assert lines()[0].endswith("got " + " ".join(["***"] * len(values)))


def test_other_packages_speak_up_only_to_warn(capture: Capture) -> None:
    lines = capture("plain", "debug")
    logging.getLogger("somebody.else").info("chatter")
    logging.getLogger("somebody.else").warning("trouble")
    assert [line.rpartition(" ")[2] for line in lines()] == ["trouble"]


def test_a_reader_that_left_is_no_error(
    capture: Capture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture("shard")

    def broken(_fd: int, _data: bytes) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", broken)
    logger.info("nobody listens")
    assert capsys.readouterr().err == "", "logging prints what a handler lets through instead of raising it"
