"""Tests the webhook with a real API server, and tests pods that are created while no webhook
responds.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headroom.contract.gate import gate_container, is_gated
from headroom.contract.kube import Pod
from headroom.core.recommend.pod_programs import programs_of
from tests.admission.reviews import container, manifest
from tests.admission.site import (
    EXTENDER,
    GATE_IMAGE,
    NODES,
    OPTED_OUT,
    PODS,
    SYSTEM,
    TEAM,
    Reply,
    Site,
    installed,
    manifests,
)
from tests.builders import GPU
from tests.console.test_recommendations import profile
from tests.controlplane import ControlPlane
from tests.waiting import until

HERE, OTHER = NODES
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{TEAM}/deployments"
NAMESPACE = f"/api/v1/namespaces/{TEAM}"
#: A path that leads to the gate's program. The API server stores such a path unchanged.
AGENT_FOLDER = "/var/run/secrets/../../../agent"


@pytest.fixture(scope="module")
def site(plane: ControlPlane) -> Iterator[Site]:
    """A cluster with two GPU nodes, one of which is gated, and a namespace with a default
    request.
    """
    with installed(plane) as site:
        for role in manifests("components/in-tree-mirror/rbac.yaml"):
            if role["kind"] == "ClusterRole":
                site.grant(role)
        amounts = {"cpu": "64", "memory": "1Ti", "pods": "100", GPU: "4"}
        for node in NODES:
            status = {"status": {"capacity": amounts, "allocatable": amounts}}
            site.plane.call("PATCH", f"/api/v1/nodes/{node}/status", status)
        annotate(site, NAMESPACE, {"headroom.gpu/default-vram": "4Gi"})
        site.serve(gate_image=GATE_IMAGE)
        until(lambda: warned_of(site), "the API server calls the webhook")
        yield site


def annotate(site: Site, path: str, annotations: dict[str, str | None]) -> Reply:
    return site.send("PATCH", path, {"metadata": {"annotations": annotations}})


def create(site: Site, obj: dict[str, Any], namespace: str = TEAM, really: bool = False) -> Reply:
    path = f"/api/v1/namespaces/{namespace}/pods"
    return site.send("POST", path if really else f"{path}?dryRun=All", obj)


def warned_of(site: Site) -> bool:
    label = manifest(None, container(gpus=0))
    label["metadata"]["labels"]["headroom.gpu/vram"] = "8Gi"
    mutated = create(site, manifest("8Gi")).body.get("spec", {}).get("schedulerName")
    return bool(create(site, label).warnings) and mutated == "headroom"


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    env = pod["spec"]["containers"][0].get("env", ())
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in env}


def test_a_gpu_pod_gets_its_scheduler_and_the_default_of_its_namespace(site: Site) -> None:
    reply = create(site, manifest(None))
    assert reply.status == 201
    assert reply.body["spec"]["schedulerName"] == "headroom"
    assert reply.body["metadata"]["annotations"] == {
        "headroom.gpu/vram": "4Gi",
        "headroom.gpu/vram-from": f"namespace {TEAM}",
    }


def test_a_copied_placement_is_removed_before_the_policy_could_reject_it(site: Site) -> None:
    reply = create(site, manifest("8Gi", annotations={"headroom.gpu/placement": "{}"}))
    assert reply.status == 201
    assert reply.body["metadata"]["annotations"] == {"headroom.gpu/vram": "8Gi"}
    assert reply.warnings == (
        "Headroom: annotation headroom.gpu/placement was removed: Headroom writes it when it "
        "places the pod",
    )


@pytest.mark.parametrize(
    "amounts",
    [
        {"cpu": "1", "memory": "1Gi", f"{GPU}.shared": "1"},
        {"nvidia.com/mig-1g.10gb": "1"},
        {"cpu": "1", "hugepages-2Mi": "2Mi", "memory": "1Gi", "nvidia.com/mig-9g.900gb": "1"},
    ],
)
@pytest.mark.parametrize("role", ["containers", "initContainers"])
def test_a_gpu_next_to_other_resources_is_recognised(
    site: Site, amounts: dict[str, str], role: str
) -> None:
    one = container("other", resources={"limits": amounts, "requests": amounts})
    obj = manifest(None, container(gpus=0))
    obj["spec"].setdefault(role, []).append(one)
    assert create(site, obj).body["spec"]["schedulerName"] == "headroom"


@pytest.mark.parametrize(
    ("obj", "namespace"),
    [
        pytest.param(manifest(None, container(gpus=0)), TEAM, id="no GPU"),
        pytest.param(manifest(None), OPTED_OUT, id="opted out"),
        pytest.param(manifest(None), SYSTEM, id="Headroom's own namespace"),
        pytest.param(manifest(None), "kube-system", id="kube-system"),
    ],
)
def test_other_objects_stay_unchanged(site: Site, obj: dict[str, Any], namespace: str) -> None:
    reply = create(site, obj, namespace)
    assert reply.status == 201
    assert reply.body["spec"]["schedulerName"] == "default-scheduler"
    assert "annotations" not in reply.body["metadata"]


def test_an_invalid_annotation_is_rejected_with_a_message_for_its_author(site: Site) -> None:
    reply = create(site, manifest("8GB"))
    assert reply.status == 422
    assert reply.message == (
        'admission webhook "pods.headroom.gpu" denied the request: Headroom: annotation '
        "headroom.gpu/vram: '8GB' is not valid: 'GB' is not a unit; units are like Mi, Gi, M and "
        "G. Example: headroom.gpu/vram: 8Gi"
    )


def test_workloads_with_mistakes_are_admitted_with_a_warning(site: Site) -> None:
    labels = {"app": "p"}
    template = {key: manifest("8GB")[key] for key in ("metadata", "spec")}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    body = {"metadata": {"name": "d"}, "spec": spec}
    reply = site.send("POST", f"{DEPLOYMENTS}?dryRun=All", body)
    assert reply.status == 201
    (shown,) = reply.warnings
    assert shown.startswith(
        "Headroom: pods of this Deployment will be rejected: annotation headroom.gpu/vram: '8GB'"
    )
    template["metadata"]["annotations"]["headroom.gpu/vram"] = "8Gi"
    assert site.send("POST", f"{DEPLOYMENTS}?dryRun=All", body).warnings == ()
    template["metadata"]["annotations"]["headroom.gpu/vram"] = "8GB"
    job = {"template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}}
    cron = {"schedule": "0 0 * * *", "jobTemplate": {"spec": job}}
    path = f"/apis/batch/v1/namespaces/{TEAM}/cronjobs?dryRun=All"
    reply = site.send("POST", path, {"metadata": {"name": "c"}, "spec": cron})
    assert "pods of this CronJob will be rejected" in reply.warnings[0]


def test_mistakes_of_administrators_are_rejected_where_they_are_made(site: Site) -> None:
    reply = annotate(site, f"{NAMESPACE}?dryRun=All", {"headroom.gpu/default-vram": "4GB"})
    assert reply.status == 422
    assert "annotation headroom.gpu/default-vram: '4GB' is not valid" in reply.message
    path = f"/api/v1/nodes/{OTHER}?dryRun=All"
    reply = annotate(site, path, {"headroom.gpu/device-choice": "best"})
    assert reply.status == 422
    assert "annotation headroom.gpu/device-choice: 'best' is not one of" in reply.message
    # A misspelled name only causes a warning.
    reply = annotate(site, path, {"headroom.gpu/device-choise": "steered"})
    assert reply.status == 200
    assert "did you mean headroom.gpu/device-choice?" in reply.warnings[0]


def test_a_changed_pending_pod_is_reviewed_again(site: Site) -> None:
    assert create(site, manifest("8Gi"), really=True).status == 201
    path = f"{PODS}/p"
    try:
        reply = annotate(site, path, {"headroom.gpu/vram": "9GB"})
        assert reply.status == 422
        assert "annotation headroom.gpu/vram: '9GB' is not valid" in reply.message
        assert annotate(site, path, {"headroom.gpu/vram": "9Gi"}).status == 200
        requeued = site.send(
            "PATCH",
            path,
            {"metadata": {"annotations": {"headroom.gpu/retry": "1"}}},
            site.token(EXTENDER),
        )
        assert requeued.status == 200
    finally:
        site.send("DELETE", path, {"gracePeriodSeconds": 0})


def test_a_pod_with_only_the_annotation_of_a_static_pod_is_changed_like_any_other(
    site: Site,
) -> None:
    forged = {"kubernetes.io/config.mirror": "x", "headroom.gpu/placement": "{}"}
    reply = create(site, manifest("8Gi", nodeName=OTHER, annotations=forged))
    assert reply.status == 201, reply.message
    assert "annotation headroom.gpu/placement was removed" in reply.warnings[0]


def test_the_api_server_accepts_the_changed_containers(site: Site) -> None:
    wishes = {"headroom.gpu/share": "env", "headroom.gpu/gated": "true"}
    reply = create(site, manifest("8Gi", annotations=wishes))
    assert reply.status == 201
    (gate,) = reply.body["spec"]["initContainers"]
    assert (gate["name"], gate["image"]) == ("headroom-gate", GATE_IMAGE)
    assert variables(reply.body) == {
        "HEADROOM_VRAM_BYTES": {
            "fieldRef": {
                "apiVersion": "v1",
                "fieldPath": "metadata.annotations['headroom.gpu/bytes.0']",
            }
        },
        "HEADROOM_VRAM_FRACTION": {
            "fieldRef": {
                "apiVersion": "v1",
                "fieldPath": "metadata.annotations['headroom.gpu/fraction.0']",
            }
        },
    }


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param({"command": ["true"]}, id="another command"),
        pytest.param({"envFrom": [{"configMapRef": {"name": "c"}}]}, id="variables"),
        pytest.param({"volumeMounts": [{"name": "v", "mountPath": AGENT_FOLDER}]}, id="files"),
        pytest.param({"volumeDevices": [{"name": "v", "devicePath": "/d"}]}, id="devices"),
        pytest.param(
            {"restartPolicy": "Always", "lifecycle": {"postStart": {"exec": {"command": ["sh"]}}}},
            id="a sidecar with a hook",
        ),
        pytest.param(
            {"restartPolicy": "Always", "livenessProbe": {"exec": {"command": ["sh"]}}},
            id="a probe",
        ),
        pytest.param({"terminationMessagePath": f"{AGENT_FOLDER}/gate_client.py"}, id="a message"),
        pytest.param({"workingDir": "/tmp", "stdin": True, "tty": True}, id="a terminal"),
        pytest.param({"ports": [{"containerPort": 1, "hostPort": 1}]}, id="a port"),
        pytest.param({"resizePolicy": [{"resourceName": "cpu", "restartPolicy": "NotRequired"}]}),
        pytest.param({"fieldOfALaterVersion": {"a": 1}}, id="a field of a later version"),
    ],
)
@pytest.mark.parametrize("wish", ["true", "false"])
def test_only_the_name_is_kept_of_a_gate_written_by_the_author(
    site: Site, forged: dict[str, Any], wish: str
) -> None:
    gate = {**gate_container(GATE_IMAGE), **forged}
    notes = {"headroom.gpu/gated": wish}
    obj = manifest("8Gi", annotations=notes, initContainers=[container("mine", 0), gate])
    obj["spec"]["volumes"] = [{"name": "v", "configMap": {"name": "c"}}]
    reply = create(site, obj)
    assert reply.status == 201, reply.message
    stored, mine = reply.body["spec"]["initContainers"]
    assert mine["name"] == "mine"
    ours = gate_container(GATE_IMAGE)
    assert {key: stored[key] for key in ours} == ours
    assert set(stored) - set(ours) == {
        "imagePullPolicy",
        "terminationMessagePath",
        "terminationMessagePolicy",
    }
    assert stored["terminationMessagePath"] == "/dev/termination-log"
    assert is_gated(msgspec.convert(reply.body, Pod), GATE_IMAGE) == (wish == "true")


def test_a_restricted_namespace_accepts_the_gate(site: Site) -> None:
    """The namespace has the restricted Pod Security level and a LimitRange."""
    level = "pod-security.kubernetes.io/enforce"
    site.send("PATCH", NAMESPACE, {"metadata": {"labels": {level: "restricted"}}})
    limits = {
        "type": "Container",
        "min": {"cpu": "400m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
        "max": {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "9Gi"},
        "maxLimitRequestRatio": {"cpu": "1", "memory": "1", "ephemeral-storage": "1"},
    }
    site.create(
        f"{NAMESPACE}/limitranges", {"metadata": {"name": "l"}, "spec": {"limits": [limits]}}
    )
    strict = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    amounts = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "9Gi", "nvidia.com/gpu": "1"}
    resources = {"limits": amounts, "requests": amounts}
    try:
        obj = manifest("8Gi", container(securityContext=strict, resources=resources))
        until(
            lambda: "minimum memory" in create(site, small(obj)).message, "the LimitRange applies"
        )
        obj["metadata"]["annotations"]["headroom.gpu/gated"] = "true"
        reply = create(site, obj)
        assert reply.status == 201, reply.message
        assert is_gated(msgspec.convert(reply.body, Pod), GATE_IMAGE)
    finally:
        site.send("PATCH", NAMESPACE, {"metadata": {"labels": {level: None}}})
        site.send("DELETE", f"{NAMESPACE}/limitranges/l")


def small(obj: dict[str, Any]) -> dict[str, Any]:
    """Return the pod with a memory request that is too small for the LimitRange."""
    amounts = {"cpu": "1", "memory": "1Mi", "nvidia.com/gpu": "1"}
    (main,) = obj["spec"]["containers"]
    resources = {"limits": amounts, "requests": amounts}
    return obj | {"spec": obj["spec"] | {"containers": [main | {"resources": resources}]}}


def test_an_unavailable_webhook_delays_only_gpu_pods(site: Site) -> None:
    site.kill_webhook()
    try:
        rejected = create(site, manifest("8Gi"))
        assert rejected.status == 500
        assert 'failed calling webhook "pods.headroom.gpu"' in rejected.message
        assert create(site, manifest(None, container(gpus=0))).status == 201
        assert create(site, manifest("8GB", container(gpus=0))).status == 201
        for left_out in (SYSTEM, OPTED_OUT):
            assert create(site, manifest("8Gi"), left_out).status == 201
        spec = {"selector": {"matchLabels": {"app": "p"}}, "template": manifest("8GB")}
        body = {"metadata": {"name": "d"}, "spec": spec}
        assert site.send("POST", f"{DEPLOYMENTS}?dryRun=All", body).status == 201
        assert annotate(site, NAMESPACE, {"team/note": "x"}).status == 200
    finally:
        site.serve_webhook(gate_image=GATE_IMAGE)
    until(lambda: create(site, manifest("8Gi")).status == 201, "GPU pods are created again")


def test_auto_gets_the_recommendation_of_its_owner(site: Site) -> None:
    obj = manifest("auto,max=20Gi")
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "llm-5d4f", "uid": "rs"}
    obj["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    obj["metadata"]["labels"]["pod-template-hash"] = "5d4f"
    # The webhook also works if the API server has no VRAMProfiles, and uses the default of the
    # namespace.
    before = create(site, obj).body["metadata"]["annotations"]
    assert (before["headroom.gpu/vram"], before["headroom.gpu/vram-requested"]) == (
        *("4Gi",),
        "auto,max=20Gi",
    )
    for crd in manifests("base/crd-vramprofile.yaml"):
        made = site.send("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        assert made.status in (201, 409)  # Another module may have created it.
    programs, _ = programs_of(json.dumps(obj).encode())
    found = profile(
        namespace=TEAM, program=programs["main"].fingerprint, ended_s=time.time() - 3600
    )
    path = f"/apis/headroom.gpu/v1alpha1/namespaces/{TEAM}/vramprofiles"
    body = json.loads(msgspec.json.encode(found))
    until(lambda: site.send("GET", path).status != 404, "VRAMProfiles are served")
    site.plane.call("POST", path, body)

    def written() -> str:
        answer: str = create(site, obj).body["metadata"]["annotations"]["headroom.gpu/vram"]
        return answer

    until(lambda: written() == "9600Mi", "the webhook has the profile", 120, 0.5, written)
    after = create(site, obj).body["metadata"]["annotations"]
    assert after["headroom.gpu/vram-from"] == "VRAMProfile deployment-llm"
    assert after["headroom.gpu/vram-requested"] == "auto,max=20Gi"
