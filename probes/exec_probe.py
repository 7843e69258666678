"""`deepseek-tgi probe live|ready|startup`: one question to a probe port, for probes that run a command.

Imports as little as may be: it is started every few seconds, beside a server that needs the cores.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence

from deepseek_tgi.errors import ConfigError

FACES = {"live": "/livez", "ready": "/readyz", "startup": "/startupz"}
DEFAULT_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 65536
USAGE = """usage: deepseek-tgi probe live|ready|startup [--host H] [--port N] [--timeout S] [--verbose]

Ask a running server; exits with 0 for yes and 1 for no (or no answer), and prints the answer.

  --host H     address of the server (default 127.0.0.1)
  --port N     port to ask (default: DEEPSEEK_TGI_PROBE_PORT, else PORT, else 3000)
  --timeout S  seconds to wait for the answer (default 1)
  --verbose    show every check of a yes too

example:
  deepseek-tgi probe ready --port 3000
"""


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """The command; its exit code. Raises `ConfigError` for options that are wrong."""
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    face, options = _parsed(argv, environ)
    path = FACES[face] + ("?verbose" if options["--verbose"] else "")
    address = options["--host"], int(options["--port"])
    try:
        status, text = ask(address, path, float(options["--timeout"]))
    except (OSError, ValueError) as error:
        sys.stdout.write(f"no answer from {address[0]}:{address[1]}: {error}\n")
        return 1
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    return 0 if status == 200 else 1


def ask(address: tuple[str, int], path: str, timeout_s: float) -> tuple[int, str]:
    """Status and text of `GET path`. Raises `OSError` without an answer in time, `ValueError` for one that is none."""
    deadline = time.monotonic() + timeout_s
    with socket.create_connection(address, timeout_s) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        data = b""
        while len(data) < MAX_ANSWER_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            piece = connection.recv(8192)
            if not piece:
                break
            data += piece
    head, found, body = data.partition(b"\r\n\r\n")
    words = head.split(b"\r\n")[0].split(b" ")
    if not found or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError(f"expected an answer of HTTP/1.1, got {data[:40]!r}")
    return int(words[1]), body.decode(errors="replace")


def _parsed(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    port = environ.get("DEEPSEEK_TGI_PROBE_PORT", "0")
    options = {
        "--host": "127.0.0.1",
        "--port": port if port.strip("0") else environ.get("PORT", "3000"),
        "--timeout": str(DEFAULT_TIMEOUT_S),
        "--verbose": "",
    }
    rest = list(argv)
    faces: list[str] = []
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if name == "--verbose":
            options[name] = "yes"
        elif name in options:
            if not given and not rest:
                raise ConfigError(f"probe: {name} needs a value")
            options[name] = value if given else rest.pop(0)
        elif name.startswith("-"):
            raise ConfigError(f"probe: unknown option {name}; known: {', '.join(options)}")
        else:
            faces.append(name)
    if len(faces) != 1 or faces[0] not in FACES:
        raise ConfigError(f"probe: got {' '.join(faces) or 'nothing'}, expected one of {', '.join(FACES)}")
    if not (options["--port"].isascii() and options["--port"].isdigit() and 0 < int(options["--port"]) < 65536):
        raise ConfigError(f"probe: port: got {options['--port']!r}, expected a whole number from 1 to 65535")
    try:
        if not 0 < float(options["--timeout"]) < 3600:
            raise ValueError
    except ValueError:
        got = options["--timeout"]
        raise ConfigError(f"probe: --timeout: got {got!r}, expected seconds above 0 and below 3600") from None
    return faces[0], options
