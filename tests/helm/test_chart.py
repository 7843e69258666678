"""The chart's objects: valid, restricted, wired to each other, and absent where they are switched off."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helm_chart import CHART, CI_VALUES, NEW_KUBERNETES, OLD_KUBERNETES, Document, Refused, Rendered, render, run
from peers import HELMS

from deepseek_tgi.config import LauncherConfig, ShardConfig, read
from deepseek_tgi.launcher.main import PROGRAM
from deepseek_tgi.options import Program

EACH_VALUES = pytest.mark.parametrize("values", CI_VALUES, ids=lambda path: path.name.removesuffix("-values.yaml"))
ALWAYS = ["Deployment", "Service"]


@EACH_VALUES
def test_it_is_strictly_clean(helm: str, values: Path) -> None:
    assert "0 chart(s) failed" in run(helm, "lint", "--strict", str(CHART), "--values", str(values))


@pytest.mark.parametrize("kubernetes", [OLD_KUBERNETES, NEW_KUBERNETES])
@EACH_VALUES
def test_every_object_is_one_of_kubernetes(any_helm: str, values: Path, kubernetes: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="the test extra brings it")
    rendered = render(any_helm, "--values", str(values), kubernetes=kubernetes)
    for document in rendered.documents:
        schemas.validate(document, kubernetes, strict=True)


def test_an_object_with_a_wrong_field_would_be_found(any_helm: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="the test extra brings it")
    service = render(any_helm).one("Service")
    with pytest.raises(schemas.ValidationError, match="prots"):
        schemas.validate({**service, "spec": {**service["spec"], "prots": []}}, NEW_KUBERNETES, strict=True)


@EACH_VALUES
def test_both_helms_make_the_same_objects(helm: str, any_helm: str, values: Path) -> None:
    assert render(helm, "--values", str(values)) == render(any_helm, "--values", str(values))


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, [*ALWAYS, "Pod", "ServiceAccount"]),
        ({"tests.enabled": False}, [*ALWAYS, "ServiceAccount"]),
        ({"serviceAccount.create": False}, [*ALWAYS, "Pod"]),
        ({"persistence.enabled": True}, [*ALWAYS, "PersistentVolumeClaim", "Pod", "ServiceAccount"]),
        ({"persistence.enabled": True, "persistence.existingClaim": "theirs"}, [*ALWAYS, "Pod", "ServiceAccount"]),
        ({"persistence.existingClaim": "theirs"}, [*ALWAYS, "Pod", "ServiceAccount"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_is_switched_off_gives_no_document(any_helm: str, values: dict[str, Any], kinds: list[str]) -> None:
    assert render(any_helm, values=values).kinds == sorted(kinds)


def test_switched_off_parts_leave_no_trace_in_what_stays(any_helm: str) -> None:
    plain = render(any_helm, values={"metrics.enabled": False})
    assert [port["name"] for port in plain.server["ports"]] == ["http", "probes"]
    assert [port["name"] for port in plain.one("Service")["spec"]["ports"]] == ["http"]
    assert "DEEPSEEK_TGI_METRICS_PORT" not in environment(plain)
    assert not [entry for entry in plain.server["env"] if "valueFrom" in entry]
    assert "tolerations" not in plain.pod["spec"]
    assert set(plain.server["resources"]["limits"]) == {"memory"}


# What the container is told.


def environment(rendered: Rendered) -> dict[str, str]:
    """The container's variables; a secret's value is its place."""
    found = {}
    for entry in rendered.server["env"]:
        source = entry.get("valueFrom", {}).get("secretKeyRef")
        found[entry["name"]] = f"{source['name']}/{source['key']}" if source else entry.get("value", "1")
    return found


@EACH_VALUES
def test_the_programs_understand_what_they_are_told(any_helm: str, values: Path) -> None:
    rendered = render(any_helm, "--values", str(values))
    assert rendered.server["command"] == ["text-generation-launcher"]
    resolved = read(LauncherConfig, PROGRAM, rendered.server["args"], environment(rendered))
    assert resolved.config.backend == "deepseek-quant"
    read(ShardConfig, Program("text-generation-server", ""), [], environment(rendered))


def launcher_config(rendered: Rendered) -> LauncherConfig:
    config: LauncherConfig = read(LauncherConfig, PROGRAM, rendered.server["args"], environment(rendered)).config
    return config


def test_default_values_serve_the_bundled_model_on_the_cpu(any_helm: str) -> None:
    config = launcher_config(render(any_helm))
    assert (config.model_id, config.device, config.router, config.num_shard) == ("demo", "cpu", "embedded", 1)


def test_values_reach_the_launcher(any_helm: str) -> None:
    config = launcher_config(render(any_helm, "--values", str(CHART / "ci/gpu-values.yaml")))
    assert (config.model_id, config.revision, config.num_shard) == ("deepseek-ai/DeepSeek-V2-Lite-Chat", "main", 2)
    assert (config.kv_cache_dtype, config.kv_memory, config.device) == ("int8", 16 * 2**30, "cuda")
    assert (config.max_input_tokens, config.max_total_tokens) == (30720, 32768)
    assert (config.graceful_termination_timeout, config.shutdown_delay) == (600, 20.0)
    assert (config.api_key, config.admin_token) == ("deepseek/api-key", "deepseek/admin-token")


def test_large_numbers_stay_numbers(any_helm: str) -> None:
    values = {"model.maxTotalTokens": 20_000_000, "model.maxInputTokens": 10_000_001}
    config = launcher_config(render(any_helm, values=values))
    assert (config.max_total_tokens, config.max_input_tokens) == (20_000_000, 10_000_001)


def test_the_cluster_adds_no_variable_that_the_server_refuses(any_helm: str) -> None:
    """A Service called deepseek-tgi would be told as DEEPSEEK_TGI_SERVICE_HOST, which is no option."""
    rendered = render(any_helm)
    assert rendered.pod["spec"]["enableServiceLinks"] is False
    assert rendered.one("Pod")["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("server.extraArgs", ["--port=1"], "server.extraArgs: --port is"),
        ("server.extraArgs", ["--graceful-termination-timeout", "1"], "--graceful-termination-timeout is"),
        ("server.extraArgs", ["-g5"], "-g5 is"),
        ("grpc", {"enabled": True, "tls": {"clientCertificates": True}}, "grpc.tls.clientCertificates: clients show"),
        ("probes.handler", "grpc", "probes.handler: grpc needs grpc.enabled"),
        ("server.extraEnv", [{"name": "HF_TOKEN", "value": "x"}], "server.extraEnv: HF_TOKEN is"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(helm: str, key: str, value: Any, named: str) -> None:
    with pytest.raises(Refused, match=re.escape(named)):
        render(helm, values={key: value})


# Wiring.


@EACH_VALUES
def test_probes_and_services_find_their_ports(any_helm: str, values: Path) -> None:
    rendered = render(any_helm, "--values", str(values))
    ports = {port["name"]: port["containerPort"] for port in rendered.server["ports"]}
    config = launcher_config(rendered)
    assert (ports["http"], ports["probes"]) == (config.port, config.probe_port)
    assert len(set(ports.values())) == len(ports)
    for port in rendered.one("Service")["spec"]["ports"]:
        assert port["targetPort"] in ports
        assert port["targetPort"] != "probes", "it tells reasons"
    selector = rendered.one("Service")["spec"]["selector"]
    assert selector.items() <= rendered.pod["metadata"]["labels"].items()
    assert rendered.one("Deployment")["spec"]["selector"]["matchLabels"] == selector
    for pod in rendered.all_of("Pod"):
        assert not selector.items() <= pod["metadata"]["labels"].items(), "the test's pod would get requests"


def test_probes_ask_the_faces_that_are_meant_for_them(any_helm: str) -> None:
    server = render(any_helm).server
    asked = {name: server[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    paths = {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert asked == {name: {"path": path, "port": "probes"} for name, path in paths.items()}
    by_grpc = render(any_helm, values={"probes.handler": "grpc", "grpc.enabled": True, "grpc.port": 9033}).server
    assert by_grpc["readinessProbe"]["grpc"] == {"port": 9033}
    assert "httpGet" not in by_grpc["readinessProbe"]
    for name in ("startupProbe", "livenessProbe"):
        assert by_grpc[name] == server[name], "health over gRPC knows serving and not serving"
    by_command = render(any_helm, values={"probes.handler": "exec", "probes.port": 7001}).server
    for name, word in {"startupProbe": "startup", "readinessProbe": "ready", "livenessProbe": "live"}.items():
        command = by_command[name]["exec"]["command"]
        assert command[:4] == ["deepseek-tgi", "probe", word, "--port=7001"]
        assert "httpGet" not in by_command[name]


def test_a_start_may_take_its_limit_and_a_rollout_waits_for_it(any_helm: str) -> None:
    rendered = render(any_helm, values={"probes.startup.limitSeconds": 1000, "probes.startup.periodSeconds": 7})
    probe = rendered.server["startupProbe"]
    assert 1000 <= probe["failureThreshold"] * probe["periodSeconds"] < 1000 + 7
    assert rendered.one("Deployment")["spec"]["progressDeadlineSeconds"] > 1000


@EACH_VALUES
def test_the_grace_period_covers_every_phase_of_the_end(any_helm: str, values: Path) -> None:
    """README: both times of the server and 10 s more; the kubelet counts the preStop hook too."""
    rendered = render(any_helm, "--values", str(values))
    hook = rendered.server.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})["seconds"]
    config = launcher_config(rendered)
    needed = hook + config.shutdown_delay + config.graceful_termination_timeout + 10
    assert rendered.pod["spec"]["terminationGracePeriodSeconds"] == needed
    for name in ("startupProbe", "livenessProbe"):
        assert rendered.server[name]["terminationGracePeriodSeconds"] > hook + 10


def test_old_clusters_wait_by_a_command(any_helm: str) -> None:
    """The sleep action is on by default since 1.30."""
    new, old = (render(any_helm, kubernetes=version).server["lifecycle"]["preStop"] for version in ("1.30.0", "1.29.9"))
    assert (new, old) == ({"sleep": {"seconds": 5}}, {"exec": {"command": ["sleep", "5"]}})
    assert "lifecycle" not in render(any_helm, values={"drain.preStopSeconds": 0}).server


def test_what_an_old_cluster_does_not_know_is_left_out_or_refused(any_helm: str) -> None:
    """A probe's own grace period is known since 1.25, asking over gRPC since 1.24."""
    server = render(any_helm, kubernetes="1.20.0").server
    assert "terminationGracePeriodSeconds" not in server["livenessProbe"] | server["startupProbe"]
    with pytest.raises(Refused, match=r"grpc needs Kubernetes 1\.24"):
        render(any_helm, values={"probes.handler": "grpc", "grpc.enabled": True}, kubernetes="1.23.9")
    with pytest.raises(Refused, match=r"1\.19\.0"):
        render(any_helm, kubernetes="1.19.0")


def test_each_rank_gets_a_device(any_helm: str) -> None:
    limits = render(any_helm, values={"gpu.enabled": True, "model.tensorParallelSize": 4}).server["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 4
    assert limits["memory"] == "4Gi"
    with pytest.raises(Refused, match=r"gpu\.count: got 2, expected at least model\.tensorParallelSize \(4\)"):
        render(any_helm, values={"gpu.enabled": True, "model.tensorParallelSize": 4, "gpu.count": 2})


def test_models_are_kept_where_they_are_looked_for(any_helm: str) -> None:
    rendered = render(any_helm, "--values", str(CHART / "ci/gpu-values.yaml"))
    volumes = {volume["name"]: volume for volume in rendered.pod["spec"]["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {
        "claimName": rendered.one("PersistentVolumeClaim")["metadata"]["name"]
    }
    theirs = render(any_helm, "--values", str(CHART / "ci/exec-values.yaml"))
    mounts = {mount["mountPath"]: mount for mount in theirs.server["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    plain = {volume["name"]: volume for volume in render(any_helm).pod["spec"]["volumes"]}
    assert plain["models"] == {"name": "models", "emptyDir": {}}
    assert plain["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_certificates_are_mounted_where_they_are_read(any_helm: str) -> None:
    rendered = render(any_helm, "--values", str(CHART / "ci/gpu-values.yaml"))
    config = launcher_config(rendered)
    mounts = {mount["name"]: mount["mountPath"] for mount in rendered.server["volumeMounts"]}
    (volume,) = (volume for volume in rendered.pod["spec"]["volumes"] if volume["name"] == "grpc-tls")
    assert (volume["secret"]["secretName"], volume["secret"]["defaultMode"]) == ("deepseek-tls", 0o440)
    named = (config.grpc_tls_cert, config.grpc_tls_key, config.grpc_client_ca)
    # Keys of a secret of type kubernetes.io/tls, and cert-manager's third.
    assert named == tuple(f"{mounts['grpc-tls']}/{key}" for key in ("tls.crt", "tls.key", "ca.crt"))
    plain = launcher_config(render(any_helm, "--values", str(CHART / "ci/grpc-values.yaml")))
    assert (plain.grpc_port, plain.grpc_tls_cert, plain.grpc_client_ca) == (9033, None, None)
    assert launcher_config(render(any_helm)).grpc_port == 0


@pytest.mark.parametrize("release", ["a" * 53, "deepseek-tgi", "x-deepseek-tgi-y"])
def test_names_are_names_whatever_the_release_is_called(any_helm: str, release: str) -> None:
    text = run(any_helm, "template", release, str(CHART))
    names = re.findall(r"^  name: (.*)$", text, re.MULTILINE)
    assert len(names) == 4
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names)
    assert len(set(names)) == 2, "account, Service and Deployment share one; the test's pod has its own"


def test_the_words_after_an_install_name_the_objects() -> None:
    if not HELMS["helm-4"].ready:
        pytest.skip("helm-4 is absent: `python -m tests.peers` fetches it; helm-3 asks a cluster even when dry")
    words = run("helm-4", "install", "deepseek", str(CHART), "--dry-run=client", "--namespace", "ml")
    notes = words.partition("NOTES:")[2]
    assert "serves demo as deepseek-deepseek-tgi in ml" in notes
    assert "rollout status deployment/deepseek-deepseek-tgi" in notes
    assert "helm -n ml test deepseek" in notes


# What a cluster that enforces Pod Security "restricted" refuses.
# Source: kubernetes.io/docs/concepts/security/pod-security-standards, profile Restricted.

ALLOWED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}


def offences(pod: Document) -> list[str]:
    """What profile Restricted has against a pod's spec."""
    found = [f"{name} is true" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    of_pod = pod.get("securityContext", {})
    for volume in pod.get("volumes", []):
        found += [f"volume of type {kind}" for kind in set(volume) - {"name"} - ALLOWED_VOLUMES]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = container.get("securityContext", {})
        both = {**of_pod, **own}
        if own.get("privileged"):
            found.append("privileged")
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            found.append("capabilities")
        if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
            found.append("may be root")
        if both.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            found.append("seccompProfile")
        found += [f"hostPort {port}" for port in container.get("ports", []) if port.get("hostPort")]
    return found


@EACH_VALUES
def test_pods_are_restricted_and_cannot_write_their_root(any_helm: str, values: Path) -> None:
    rendered = render(any_helm, "--values", str(values))
    for pod in [rendered.pod, *rendered.all_of("Pod")]:
        assert offences(pod["spec"]) == []
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"]
    assert offences({"containers": [{}], "hostNetwork": True, "volumes": [{"name": "x", "hostPath": {}}]}) == [
        "hostNetwork is true", "volume of type hostPath", "allowPrivilegeEscalation", "capabilities", "may be root",
        "seccompProfile",
    ]  # fmt: skip


def test_secrets_are_references_and_absent_where_none_is_named(any_helm: str) -> None:
    plain, full = environment(render(any_helm)), render(any_helm, "--values", str(CHART / "ci/gpu-values.yaml"))
    secret = {"API_KEY", "DEEPSEEK_TGI_ADMIN_TOKEN", "HF_TOKEN"}
    assert not secret & set(plain)
    assert {name: place for name, place in environment(full).items() if name in secret} == {
        "API_KEY": "deepseek/api-key",
        "DEEPSEEK_TGI_ADMIN_TOKEN": "deepseek/admin-token",
        "HF_TOKEN": "hub/HF_TOKEN",
    }
    assert "Secret" not in full.kinds
    asked = full.one("Pod")["spec"]["containers"][0]["env"]
    assert asked == [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "deepseek", "key": "api-key"}}}]
