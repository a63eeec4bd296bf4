"""Tests which pods are gated, and which gated pods still wait."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gate import GATE, gate_container, has_gate, is_gated, waits
from headroom.contract.kube import (
    Container,
    ContainerState,
    ContainerStatus,
    ObjectMeta,
    Pod,
    PodStatus,
    Present,
    Terminated,
)
from tests.builders import GPU, container, pod

GATE_CONTAINER = Container(name=GATE)


def with_state(*states: tuple[str, ContainerState | None], phase: str = "Pending") -> Pod:
    statuses = [ContainerStatus(name=name, state=state) for name, state in states]
    shown = PodStatus(phase=phase, init_container_statuses=statuses)
    return msgspec.structs.replace(pod(init=[GATE_CONTAINER]), status=shown)


@pytest.mark.parametrize(
    ("init", "gated"),
    [
        pytest.param([GATE_CONTAINER], True, id="the gate comes first"),
        pytest.param([GATE_CONTAINER, container("warm-up")], True, id="other containers follow it"),
        pytest.param(
            [container("warm-up"), GATE_CONTAINER], False, id="another container runs before it"
        ),
        pytest.param([container("warm-up")], False, id="only another init container"),
        pytest.param([], False, id="no init container"),
        pytest.param([container(GATE, resource=GPU)], False, id="it holds a GPU itself"),
        pytest.param(
            [Container(name=GATE, restart_policy="Always")],
            False,
            id="a sidecar blocks no container",
        ),
    ],
)
def test_a_pod_is_gated_if_no_container_runs_before_its_gate_ends(
    init: list[Container], gated: bool
) -> None:
    assert has_gate(pod(init=init)) == gated
    assert waits(pod(init=init)) == gated


@pytest.mark.parametrize(
    ("of", "waiting"),
    [
        pytest.param(with_state(), True, id="no state from the kubelet yet"),
        pytest.param(with_state((GATE, None)), True, id="no state of the gate"),
        pytest.param(
            with_state((GATE, ContainerState(running=Present()))), True, id="the gate runs"
        ),
        pytest.param(
            with_state((GATE, ContainerState(terminated=Terminated(exit_code=2)))),
            True,
            id="the gate failed and restarts",
        ),
        pytest.param(
            with_state(("other", ContainerState(terminated=Terminated()))),
            True,
            id="another container ended",
        ),
        pytest.param(
            with_state((GATE, ContainerState(terminated=Terminated()))),
            False,
            id="the gate ended successfully",
        ),
        pytest.param(with_state(phase="Failed"), False, id="the kubelet rejected the pod"),
    ],
)
def test_a_gated_pod_waits_until_its_gate_ended_successfully(of: Pod, waiting: bool) -> None:
    assert waits(of) == waiting


def test_the_state_of_the_gate_is_read_from_the_status_of_kubernetes() -> None:
    written = b"""{"metadata": {"name": "p"},
        "spec": {"initContainers": [{"name": "headroom-gate"}]},
        "status": {"phase": "Pending", "initContainerStatuses": [{"name": "headroom-gate", "state":
        {"terminated": {"exitCode": 0, "reason": "Completed"}}}]}}"""
    decoded = msgspec.json.decode(written, type=Pod)
    assert has_gate(decoded)
    assert not waits(decoded)


IMAGE = "registry.example:5000/team/headroom-agent:1.0"
TOKEN = {"name": "t", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}


def decoded_with(*init: dict[str, Any]) -> Pod:
    obj = {"metadata": {"name": "p"}, "spec": {"initContainers": [*init]}}
    return msgspec.json.decode(msgspec.json.encode(obj), type=Pod)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        pytest.param({}, True, id="unchanged"),
        pytest.param({"imagePullPolicy": "Always", "tty": False}, True, id="with defaults"),
        pytest.param({"terminationMessagePath": "/dev/termination-log"}, True, id="a default"),
        pytest.param({"image": f"{IMAGE[:-3]}2.0"}, True, id="another tag"),
        pytest.param({"image": f"{IMAGE}@sha256:{'0' * 64}"}, True, id="a digest"),
        pytest.param({"volumeMounts": [TOKEN]}, True, id="the account's token"),
        pytest.param({"image": "busybox"}, False, id="another image"),
        pytest.param({"image": f"evil/{IMAGE}"}, False, id="another registry"),
        pytest.param({"command": ["true"]}, False, id="another command"),
        pytest.param({"command": None}, False, id="the image's own command"),
        pytest.param({"args": ["-c", "0"]}, False, id="arguments"),
        pytest.param({"workingDir": "/tmp"}, False, id="another folder"),
        pytest.param({"volumeMounts": [{"name": "v", "mountPath": "/opt"}]}, False, id="files"),
        pytest.param({"volumeDevices": [{"name": "v"}]}, False, id="devices"),
        pytest.param({"resources": {"claims": [{"name": "gpu"}]}}, False, id="a device of DRA"),
        pytest.param({"securityContext": {"privileged": True}}, False, id="more privileges"),
        pytest.param({"lifecycle": {"postStart": {}}}, False, id="a hook"),
        pytest.param({"livenessProbe": {"exec": {}}}, False, id="a probe that runs a command"),
        pytest.param({"stdin": True}, False, id="stdin"),
        pytest.param({"resizePolicy": [{}]}, False, id="resizePolicy"),
        pytest.param(
            {"restartPolicyRules": [{"action": "Restart"}]}, False, id="restartPolicyRules"
        ),
        pytest.param({"imagePullPolicy": "Never"}, False, id="imagePullPolicy"),
        pytest.param(
            {"terminationMessagePath": "/opt/headroom/bin/python"}, False, id="an empty file"
        ),
        pytest.param({"envFrom": [{"prefix": "PYTHON"}]}, False, id="variables of a ConfigMap"),
        pytest.param({"restartPolicy": "Always"}, False, id="a sidecar"),
        pytest.param({"resources": {"limits": {GPU: "1"}}}, False, id="it holds a GPU"),
        pytest.param({"name": "gate"}, False, id="another name"),
    ],
)
def test_a_gate_counts_if_it_equals_the_webhooks_container(
    changed: dict[str, Any], counts: bool
) -> None:
    assert is_gated(decoded_with({**gate_container(IMAGE), **changed}), IMAGE) is counts


@pytest.mark.parametrize(
    "path",
    [
        "/var/run/secrets/../../../agent",
        "/var/run/secrets/kubernetes.io/serviceaccount/../../../../../agent",
        "/var/run/secrets//../../../agent",
        "/var/run/secrets/",
        "/var/run/secrets/x",
        "/",
        "opt",
    ],
)
def test_an_authors_files_cannot_be_mounted_into_a_gate(path: str) -> None:
    """The API server stores such paths unchanged, and container runtimes resolve them."""
    mounts = [TOKEN, {"name": "v", "mountPath": path}]
    changed = {**gate_container(IMAGE), "volumeMounts": mounts}
    assert not is_gated(decoded_with(changed), IMAGE)


@pytest.mark.parametrize(
    ("annotation", "counts"),
    [(None, True), ("true", True), ("false", False), (" false ", False), ("no", False)],
)
def test_a_pod_that_requests_no_gate_is_not_gated(annotation: str | None, counts: bool) -> None:
    of = decoded_with(gate_container(IMAGE))
    annotations = {} if annotation is None else {"headroom.gpu/gated": annotation}
    of = msgspec.structs.replace(of, metadata=ObjectMeta(annotations=annotations))
    assert is_gated(of, IMAGE) is counts


def test_the_program_of_the_gate_reads_no_other_folder_or_variable() -> None:
    assert gate_container(IMAGE)["command"] == ["python", "-I", "-m", "agent.gate_client"]


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("AWS_ROLE_ARN", "r", True),
        ("AZURE_CLIENT_ID", "c", True),
        ("HEADROOM_AGENT_PORT_NUMBER", "1", False),
        ("PYTHONSTARTUP", "/x", False),
        ("LD_PRELOAD", "/x", False),
        ("POD_UID", "u", False),
    ],
)
def test_authors_cannot_set_variables_that_the_gate_reads(
    name: str, value: str, counts: bool
) -> None:
    gate = gate_container(IMAGE)
    gate["env"] = [*gate["env"], {"name": name, "value": value}]
    assert is_gated(decoded_with(gate), IMAGE) is counts


def test_a_gate_counts_only_as_the_first_container_and_if_an_image_is_set() -> None:
    gate = gate_container(IMAGE)
    assert not is_gated(decoded_with({"name": "other"}, gate), IMAGE)
    assert not is_gated(decoded_with(gate), "")
    assert not is_gated(decoded_with({**gate, "image": ""}), "")
    assert not is_gated(decoded_with(), IMAGE)
