"""`deepseek-tgi models …`: asks a running server to change its model, and shows how far it is.

Over HTTP to the embedded router's /admin routes; behind TGI's own router, which has none, straight to the shards'
sockets (`--socket`), where only a model that such a router can go on with is taken.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepseek_tgi.errors import ChildError, ConfigError, DeepseekTgiError, NotReadyError

TOKEN = "DEEPSEEK_TGI_ADMIN_TOKEN"
ANSWER_TIMEOUT_S = 10.0
CHANGE_TIMEOUT_S = 3600.0
"""Between two signs of a change: a model that makes room for another may drain for long."""
Say = Callable[[str], None]


class ModelsError(DeepseekTgiError):
    """The server did not change its model; the message is the server's."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where the server is and what opens it."""

    url: str
    token: str | None = field(repr=False)

    def __post_init__(self) -> None:
        """Raises `ConfigError` for an address or a token that no request could carry."""
        if not _leads_to_http(self.url):
            raise ConfigError(f"models: --url: got {self.url!r}, expected http://HOST:PORT")
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError(f"models: the token has characters that no header can carry; check --token or {TOKEN}")

    def get(self, path: str) -> Any:
        """The parsed answer. Raises `ModelsError` or `NotReadyError`."""
        request = urllib.request.Request(self.url + path, headers=self._headers())
        with self._told(), self._open(request, ANSWER_TIMEOUT_S) as response:
            return json.load(response)

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Progress as it comes. Raises as `get`."""
        data = json.dumps(body | {"stream": True}).encode()
        headers = self._headers() | {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with self._told(), self._open(request, CHANGE_TIMEOUT_S) as response:
            if response.headers.get_content_type() == "application/json":
                yield json.load(response)
                return
            for line in response:
                if line.startswith(b"data:"):
                    yield json.loads(line.removeprefix(b"data:"))

    def _headers(self) -> dict[str, str]:
        if not self.token:
            raise ConfigError(f"models: no token; give --token, or set {TOKEN}, as the server was started with")
        return {"authorization": f"Bearer {self.token}"}

    def _open(self, request: urllib.request.Request, timeout_s: float) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            return opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise self._refused(error) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            shown = reason if reason.isprintable() else "its answer is no HTTP"
            raise NotReadyError(f"{self.url}: no server answers: {shown}; name it with --url") from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Answers that break off, or are none, as `NotReadyError`."""
        try:
            yield
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise NotReadyError(f"{self.url}: the server's answer broke off: {reason}") from error

    def _refused(self, error: urllib.error.HTTPError) -> DeepseekTgiError:
        if error.code == 401:
            return ConfigError(f"{self.url}: the server does not take this token")
        if error.code == 404:
            return ConfigError(f"{self.url}: has no /admin routes; start it with {TOKEN} set, and the embedded router")
        try:
            return ModelsError(str(json.load(error)["error"]))
        except (ValueError, KeyError, TypeError):
            return ModelsError(f"{self.url}: the server answered {error.code}")


def _leads_to_http(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def change(door: Door, verb: str, body: dict[str, Any], say: Say) -> int:
    """Ask for a change and show it to its end; 0. Raises what stopped it."""
    last: dict[str, Any] = {}
    shown = ""
    for last in door.events(f"/admin/models/{verb}", body):
        line = f"{last['stage']} {last['percent']:.0f} %" if last["stage"] else ""
        if line and line != shown and last["state"] == "running":
            shown = line
            say(line)
    if last.get("state") != "done":
        raise ModelsError(last.get("error") or "the server said no more")
    plan = f" by the plan {last['plan']}" if last["plan"] else ""
    pause = f", new requests waited {last['pause_s']:.2f} s" if last["pause_s"] else ""
    say(f"{verb} {last['model']}: done{plan} in {last['seconds']:.2f} s{pause}")
    return 0


def show(door: Door, say: Say, as_json: bool) -> int:
    """What is served, what could be, what goes on."""
    found = door.get("/admin/models")
    if as_json:
        say(json.dumps(found, indent=2))
        return 0
    serving = found["serving"]
    if serving is None:
        say("serving   nothing")
    else:
        say(
            f"serving   {serving['model_id']} ({serving['state']}, generation {serving['generation']}, "
            f"{serving['requests']} requests)"
        )
    if found["held_requests"]:
        say(f"waiting   {found['held_requests']} requests")
    running = found["change"]
    if running is not None:
        say(f"changing  {running['kind']} {running['model']}: {running['stage']} {running['percent']:.0f} %")
    for name in found["available"]:
        say(f"available {name}")
    return 0


def history(door: Door, say: Say) -> int:
    """The changes so far, newest last."""
    for each in door.get("/admin/models")["history"]:
        error = f": {each['error']}" if each["error"] else ""
        say(
            f"{each['state']:<7} {each['kind']} {each['model']} ({each['plan'] or '-'}, {each['seconds']:.2f} s){error}"
        )
    return 0


def load_behind_tgi(stem: str, model: str, fields: dict[str, Any], say: Say) -> int:
    """Have every rank load a model that a router which knows one model can go on with; 0. Raises the first refusal."""
    import grpc

    from deepseek_tgi.pb import control_pb2 as pb
    from deepseek_tgi.pb.control_pb2_grpc import ModelControlStub

    paths = _ranks(stem)
    if len(paths) > 1:
        raise ConfigError(f"{stem}: has {len(paths)} ranks; behind TGI's router one rank can change its model")
    with grpc.insecure_channel(f"unix:{paths[0]}") as channel:
        stub = ModelControlStub(channel)
        try:
            generation = stub.Status(pb.StatusRequest()).newest + 1
            source = pb.Source(model_id=str(Path(model).resolve()) if Path(model).is_dir() else model, **fields)
            request = pb.LoadRequest(generation=generation, source=source, compatible=True)
            for step in stub.Load(request):
                say(f"{step.stage} {step.percent:.0f} %")
        except grpc.RpcError as error:
            raise ModelsError(f"{paths[0]}: {error.details()}") from error
    say(f"load {model}: done; requests that run end on the model they began with")
    return 0


def _ranks(stem: str) -> list[str]:
    if os.path.exists(stem) and not os.path.isdir(stem):
        stem = stem.removesuffix("-0")
    paths: list[str] = []
    while os.path.exists(f"{stem}-{len(paths)}"):
        paths.append(f"{stem}-{len(paths)}")
    if not paths:
        raise ChildError(f"{stem}-0: no shard's socket is there; name its stem as --shard-uds-path does")
    return paths
