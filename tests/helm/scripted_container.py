"""A container whose probes answer what a file says: `python scripted_container.py PORT FILE`.

The file has a JSON object of paths and statuses, and may say `"deaf": true` (SIGTERM is not heard) or `"exit": N`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PORT, SCRIPT = int(sys.argv[1]), Path(sys.argv[2])


def script() -> dict[str, int]:
    found: dict[str, int] = json.loads(SCRIPT.read_text())
    return found


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(script().get(self.path, 404))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


if script().get("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = HTTPServer(("127.0.0.1", PORT), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while "exit" not in script():
    time.sleep(0.02)
sys.exit(script()["exit"])
