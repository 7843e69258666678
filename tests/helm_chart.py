"""Our chart through the real `helm`: linted, rendered, and its objects by kind."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peers import HELMS

CHART = Path(__file__).resolve().parents[1] / "helm"
CI_VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
RELEASE = "deepseek"
OLD_KUBERNETES, NEW_KUBERNETES = "1.25.0", "1.37.0"

Document = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """All documents of one rendering."""

    documents: tuple[Document, ...]

    def all_of(self, kind: str) -> list[Document]:
        """The documents of one kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str) -> Document:
        """The only document of its kind."""
        (document,) = self.all_of(kind)
        return document

    @property
    def kinds(self) -> list[str]:
        """The kind of each document, sorted."""
        return sorted(document["kind"] for document in self.documents)

    @property
    def pod(self) -> Document:
        """The pod that the Deployment makes."""
        template: Document = self.one("Deployment")["spec"]["template"]
        return template

    @property
    def server(self) -> Document:
        """Its only container."""
        (container,) = self.pod["spec"]["containers"]
        found: Document = container
        return found


class Refused(Exception):
    """What helm said when it gave nothing."""


def run(name: str, *arguments: str) -> str:
    """The standard output of one of our helms. Raises `Refused` with all it said."""
    done = subprocess.run(
        [str(HELMS[name].program), *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def render(
    name: str, *arguments: str, values: Mapping[str, Any] | None = None, kubernetes: str = NEW_KUBERNETES
) -> Rendered:
    """`helm template`. `values` come last. Raises `Refused`."""
    given = [option for key, value in (values or {}).items() for option in ("--set-json", f"{key}={json.dumps(value)}")]
    return _render(name, (*arguments, *given), kubernetes)


@functools.cache
def _render(name: str, arguments: Sequence[str], kubernetes: str) -> Rendered:
    text = run(name, "template", RELEASE, str(CHART), "--kube-version", kubernetes, *arguments)
    return Rendered(tuple(document for document in yaml.safe_load_all(text) if document))


def newest() -> str | None:
    """The newest helm that is there."""
    return max((name for name, helm in HELMS.items() if helm.ready), default=None)
