"""Checks the permissions of pods on a node. Every exception has a comment with its reason."""

import re
from typing import Any

import pytest

from agent.settings import read_settings
from tests.deploy.rendered import DEPLOY, NAMESPACE, PLATFORMS, SERVING, objects, overlay, pod_specs

pytestmark = pytest.mark.slow

SCHEDULER = ("Deployment", NAMESPACE, "headroom-scheduler")
WEBHOOK = ("Deployment", NAMESPACE, "headroom-webhook")
CONSOLE = ("Deployment", NAMESPACE, "headroom-console")
RECORDER = ("Deployment", NAMESPACE, "headroom-recorder")
AGENT = ("DaemonSet", NAMESPACE, "headroom-agent")


def spec_of(platform: str, key: tuple[str, str, str]) -> dict[str, Any]:
    return pod_specs(objects(overlay(DEPLOY / "overlays" / platform)))[key]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "deployment", [SCHEDULER, WEBHOOK, CONSOLE, RECORDER], ids=lambda key: key[2]
)
def test_deployments_satisfy_the_restricted_pod_security_standard(
    platform: str, deployment: tuple[str, str, str]
) -> None:
    spec = spec_of(platform, deployment)
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == 65532
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostPID", "hostNetwork", "hostIPC"} & spec.keys()
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not [port for port in container.get("ports", ()) if "hostPort" in port]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_jobs_satisfy_the_restricted_pod_security_standard(platform: str) -> None:
    jobs = {
        key: spec
        for key, spec in pod_specs(objects(overlay(DEPLOY / "overlays" / platform))).items()
        if key[0] not in SERVING
    }
    assert jobs
    for spec in jobs.values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("platform", [each for each in PLATFORMS if each != "trial"])
def test_the_agent_has_only_the_required_privileges_and_is_privileged_only_on_gke(
    platform: str,
) -> None:
    spec = spec_of(platform, AGENT)
    (container,) = spec["containers"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    if platform == "gke":
        assert security["privileged"] is True
    else:
        assert security["privileged"] is False
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["hostPID"] is True
    assert not {"hostNetwork", "hostIPC"} & spec.keys()
    writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["/run/headroom"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_pod_has_service_variables_in_its_environment(platform: str) -> None:
    """For the Service headroom-debug, the kubelet would set the variable HEADROOM_DEBUG_PORT, which
    is the name of a setting.
    """
    for key, spec in pod_specs(objects(overlay(DEPLOY / "overlays" / platform))).items():
        assert spec["enableServiceLinks"] is False, key


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_container_has_requests_probes_and_a_measured_memory_limit(
    platform: str,
) -> None:
    for key, spec in pod_specs(objects(overlay(DEPLOY / "overlays" / platform))).items():
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "cpu" not in container["resources"].get("limits", {})
            assert ("livenessProbe" in container) == (key[0] in SERVING)


def test_only_gpu_nodes_have_an_agent() -> None:
    for platform in PLATFORMS:
        found = pod_specs(objects(overlay(DEPLOY / "overlays" / platform)))
        if AGENT not in found:
            continue
        affinity = found[AGENT]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert terms
        assert all(term["matchExpressions"] for term in terms), "an empty term is no node"


@pytest.mark.parametrize("platform", [each for each in PLATFORMS if each != "trial"])
def test_the_agent_reads_the_variables_of_its_manifest(platform: str) -> None:
    (container,) = spec_of(platform, AGENT)["containers"]
    env = {each["name"]: each.get("value", "of-the-pod") for each in container["env"]}
    settings = read_settings([], env)
    assert (settings.node, settings.namespace) == ("of-the-pod", "of-the-pod")
    assert str(settings.state) == "/run/headroom/agent.json"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    wanted = (
        *(settings.checkpoint, settings.pod_resources, settings.cgroups, settings.state),
        *(settings.tls_cert, settings.tls_key),
    )
    for path in wanted:
        assert path is not None
        assert {str(path), str(path.parent)} & mounted, path
    ports = [each["containerPort"] for each in container["ports"]]
    assert ports == [settings.port, settings.metrics_port]
    ours = {name for name in env if name.startswith("HEADROOM_")}
    read = {"HEADROOM_NAMESPACE", "HEADROOM_STATE", "HEADROOM_TLS_CERT", "HEADROOM_TLS_KEY"}
    assert ours <= read, "and is it read?"


#: Fields of a manifest that need a comment.
_QUESTIONABLE = re.compile(
    r"^\s*(hostPID: true|tolerations:|- \{name: .*mountPath: /(var|run|sys|usr)"
    r"|add: \[|runAsUser: 0|appArmorProfile:|privileged: true|- \{name: metrics, .*hostPort"
    r"|seLinuxOptions:|- \{name: NVIDIA_)"
)


def test_every_host_path_and_privilege_of_the_agent_has_its_reason_above() -> None:
    files = [
        DEPLOY / "base/agent.yaml",
        *DEPLOY.glob("overlays/*/kustomization.yaml"),
        *DEPLOY.glob("components/*/kustomization.yaml"),
    ]
    seen = 0
    for file in files:
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            if _QUESTIONABLE.match(line):
                seen += 1
                message = lines[i - 1].lstrip().startswith("#") or lines[0].startswith("#")
                above = lines[i - 1].lstrip().startswith("#")
                assert above or (file.parent.parent.name == "components" and message), (
                    f"{file.relative_to(DEPLOY)}:{i + 1}: {line.strip()} has no reason above it"
                )
    assert seen > 12
