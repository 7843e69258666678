"""values.schema.json: it knows every value, agrees with the programs, and refuses what is wrong by its name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, Refused, render, run

from deepseek_tgi.config import KV_DTYPES, LauncherConfig
from deepseek_tgi.errors import ConfigError
from deepseek_tgi.options import byte_size, options_of

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")
VALUES: dict[str, Any] = yaml.safe_load(TEXT)


def paths(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each place at which schema and values differ in their keys, and in which of them the key is missing."""
    if "properties" not in schema or not isinstance(values, dict):
        return
    assert schema["additionalProperties"] is False, path
    for key in schema["properties"].keys() - values.keys() - {"global", "claims"}:
        yield f"{path}.{key}", "values"
    for key in values.keys() - schema["properties"].keys():
        yield f"{path}.{key}", "schema"
    for key in values.keys() & schema["properties"].keys():
        yield from paths(schema["properties"][key], values[key], f"{path}.{key}")


def test_schema_and_values_have_the_same_keys() -> None:
    assert list(paths(SCHEMA, VALUES)) == []


def test_every_value_is_explained_above_it() -> None:
    """Groups are named by their key; what is in them, and every value beside them, has a comment."""
    lines = TEXT.splitlines()
    told_by_the_key = {"type: RollingUpdate", "rollingUpdate:", "maxSurge: 1", "maxUnavailable: 0", 'cpu: "1"'}
    told_by_the_key |= {"memory: 2Gi", "memory: 4Gi", "requests:", "limits:"}
    for above, line in itertools.pairwise(lines):
        key = line.strip()
        if not key or key.startswith("#") or key in told_by_the_key:
            continue
        is_group = re.fullmatch(r"[a-zA-Z]+:", key)
        assert is_group or above.strip().startswith("#"), f"{key} has no comment"


def test_kinds_of_numbers_are_the_programs_own() -> None:
    model = SCHEMA["properties"]["model"]["properties"]
    known = set(model["kvCacheQuantization"]["enum"])
    # FP8 with two bits of mantissa is known to the programs, and refused.
    assert known == set(KV_DTYPES) - {"fp8_e5m2"}


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("num_shard", "model.tensorParallelSize"),
        ("max_concurrent_requests", "model.maxConcurrentRequests"),
        ("port", "server.port"),
        ("probe_port", "probes.port"),
        ("grpc_port", "grpc.port"),
        ("stall_limit", "probes.stallLimitSeconds"),
        ("shutdown_delay", "drain.shutdownDelaySeconds"),
        ("graceful_termination_timeout", "drain.limitSeconds"),
    ],
)
def test_what_the_schema_lets_through_the_launcher_takes(field: str, place: str) -> None:
    limits = SCHEMA
    for key in place.split("."):
        limits = limits["properties"][key]
    parse = options_of(LauncherConfig)[field].parse
    for value in (limits["minimum"], limits.get("maximum", limits["minimum"])):
        assert parse(str(value)) == value


@pytest.mark.parametrize(
    "text", ["4GiB", "512MiB", "1.5GB", "123", "4Gi", "lots", "-1GiB", "4 GiB", "1e3", "GiB", "4gib"]
)
def test_sizes_are_those_that_the_programs_read(text: str) -> None:
    matches = re.search(SCHEMA["properties"]["model"]["properties"]["kvMemory"]["pattern"], text) is not None
    try:
        byte_size(text)
        reads = True
    except (ConfigError, ValueError):
        reads = False
    assert reads or not matches, "what the chart lets through must start"


WRONG: dict[str, Any] = {
    "replicaCount": -1,
    "image.pullPolicy": "Sometimes",
    "image.digest": "latest",
    "model.modelUri": "",
    "model.kvCacheQuantization": "int3",
    "model.tensorParallelSize": 0,
    "model.kvMemory": "lots",
    "server.port": 80,
    "server.extraArgs": "--x",
    "server.extraEnv": [{"value": "nameless"}],
    "auth.apiKey": "s3cret",
    "metrics.enabled": "yes",
    "service.port": 70000,
    "grpc.port": "8033",
    "probes.handler": "grpc-ish",
    "probes.startup.limitSeconds": 0,
    "probes.readiness.failureThreshold": 0,
    "drain.limitSeconds": "90s",
    "gpu.enabled": "true",
    "gpu.count": 1.5,
    "resources.limits": "4Gi",
    "sharedMemorySize": "1 gigabyte",
    "persistence.accessModes": ["ReadSometimes"],
    "security.runAsUser": 0,
    "updateStrategy.type": "Rolling",
    "privileged": True,
    "securityContext": {"privileged": True},
}


def test_wrong_values_are_refused_by_name(helm: str, tmp_path: Path) -> None:
    nested: dict[str, Any] = {}
    for path, value in WRONG.items():
        at = nested
        *above, last = path.split(".")
        for key in above:
            at = at.setdefault(key, {})
        at[last] = value
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(nested), encoding="utf-8")
    with pytest.raises(Refused) as refused:
        run(helm, "template", "x", str(CHART), "--values", str(tmp_path / "wrong.yaml"))
    said = str(refused.value).replace("/", ".")
    assert [path for path in WRONG if path not in said] == []


@pytest.mark.parametrize("path", ["model.kvCacheQuantization", "security.runAsUser", "securityContext"])
def test_one_wrong_value_is_enough(helm: str, path: str) -> None:
    with pytest.raises(Refused):
        render(helm, values={path: WRONG[path]})


def test_a_chart_above_may_pass_its_globals(any_helm: str) -> None:
    assert render(any_helm, values={"global.region": "eu"}) == render(any_helm)
