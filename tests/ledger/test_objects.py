"""Tests the size, the unknown fields and the request priority of GPUNodes in the API server."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import urllib3
import yaml
from kubernetes.client import ApiClient

from agent.kube_client import of_client
from agent.kube_publisher import KubernetesPublisher
from headroom.contract.gpunode import (
    Charge,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
)
from headroom.contract.gpunode_json import encode_gpunode
from headroom.contract.kube import ObjectMeta
from headroom.errors import OutcomeUnknown, StoreRejected
from headroom.runtime.kube.client import KubeApi
from tests.blocking import Blocking, Loop
from tests.builders import GIB, GPU, STAMP, shared
from tests.controlplane import ROOT, ApiRefused, ControlPlane, crd_manifest
from tests.waiting import PATIENCE_S, until

GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gpunodes.headroom.gpu"
FLOWCONTROL = "/apis/flowcontrol.apiserver.k8s.io/v1"
#: etcd's default limit for one request.
ETCD_BYTES = 1_572_864


#: A kubelet's default maximum number of pods.
KUBELET_PODS = 110


def full(devices: int, pods: int, candidates: int) -> GPUNode:
    """Return a node with these numbers of devices, pods and candidates. Its names are as long as in
    real clusters.
    """
    uuids = [f"GPU-{index:08x}-0f3a-4b2c-8d4e-7d8e9f0a1b2c" for index in range(devices)]
    uids = [f"{number:08x}-8d4e-4f5a-9b6c-7d8e9f0a1b2c" for number in range(pods)]
    reservations = {
        uid: Reservation(
            namespace="machine-learning-research",
            name=f"training-job-with-a-long-name-7d8f9c6b5-{number:05d}",
            charges=[
                Charge(
                    resource=GPU,
                    count=1,
                    candidates={
                        uuids[(number + at) % devices]: GIB + number for at in range(candidates)
                    },
                )
            ],
            attempt=f"0123456789ab-{number:032x}",
            since="2026-11-21T00:00:00.000+00:00",
        )
        for number, uid in enumerate(uids)
    }
    uses = [
        PodUse(
            uid=uid,
            device=uuids[number % devices],
            namespace=reservations[uid].namespace,
            name=reservations[uid].name,
            container="main",
            replica=f"{uuids[number % devices]}::{number // devices}",
            used_bytes=GIB + number,
            source="checkpoint,podresources,nvml",
        )
        for number, uid in enumerate(uids)
    ]
    return GPUNode(
        metadata=ObjectMeta(name="full", uid="u", resource_version="1"),
        spec=GPUNodeSpec(initialised=True, reservations=reservations, reserved="1024Gi"),
        status=GPUNodeStatus(
            observed_at="2026-11-21T00:00:00.000000Z",
            devices=[
                shared(uuid, free=0, allocated=pods // devices, model="NVIDIA A100-SXM4-80GB")
                for uuid in uuids
            ],
            pods=uses,
        ),
    )


@pytest.mark.parametrize(
    ("devices", "pods", "candidates", "most_kib"),
    [
        pytest.param(8, 32, 1, 24, id="8 GPUs with 4 confirmed pods each"),
        pytest.param(16, 1024, 1, 768, id="16 GPUs with 64 confirmed pods each"),
        pytest.param(16, 1024, 16, 1520, id="16 GPUs with 64 unconfirmed pods each"),
        pytest.param(
            112, KUBELET_PODS, 112, 1024, id="112 MIG devices with the maximum number of pods"
        ),
    ],
)
def test_a_full_node_stays_below_the_etcd_limit(
    devices: int, pods: int, candidates: int, most_kib: int
) -> None:
    size = len(encode_gpunode(full(devices, pods, candidates)))
    assert size <= most_kib << 10 < ETCD_BYTES
    assert size > (most_kib << 10) // 2  # The estimate is less than twice the size.


@pytest.fixture
def store(plane: ControlPlane) -> Iterator[Blocking]:
    # Use a long timeout, because on a busy machine the API server needs 20 s for the largest
    # objects and sends nothing meanwhile.
    configuration = plane.configuration()
    api = KubeApi(configuration)
    with Loop() as loop:
        yield loop.store(configuration, api, read_timeout_s=PATIENCE_S, total_timeout_s=PATIENCE_S)
    api.close()


def written(store: Blocking, spec: GPUNodeSpec) -> GPUNode:
    """Write the spec of GPUNode ``full``. Try again after a 504, because the API server gives up a
    write after 34 s, and a busy machine needs longer for the largest objects.
    """
    while True:
        held = store.read_gpunode("full")
        assert held is not None
        try:
            return store.write_spec(held, spec)
        except OutcomeUnknown as err:
            if ": 504 " not in str(err):
                raise


@contextlib.contextmanager
def existing(plane: ControlPlane, name: str) -> Iterator[None]:
    body = {
        "apiVersion": "headroom.gpu/v1alpha1",
        "kind": "GPUNode",
        "metadata": {"name": name},
        "spec": {"initialised": True},
    }

    def made() -> bool:
        try:
            return bool(plane.call("POST", GPUNODES, body))
        except ApiRefused as err:
            if "503" not in str(
                err
            ):  # The API server returns 503 until it has switched to the other schema.
                raise
            return False

    until(made, "a GPUNode that can be made")
    try:
        yield
    finally:
        plane.call("DELETE", f"{GPUNODES}/{name}")


def newer_crd() -> dict[str, Any]:
    """Return the CRD of a future version with unknown fields in every part."""
    crd = copy.deepcopy(crd_manifest())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    reservation = schema["spec"]["properties"]["reservations"]["additionalProperties"]
    plugin = schema["status"]["properties"]["plugin"]
    for part in (schema["spec"], reservation, schema["status"], plugin):
        part["x-kubernetes-preserve-unknown-fields"] = True
    return crd


@pytest.fixture
def newer(plane: ControlPlane) -> Iterator[None]:
    def put(spec: Any) -> None:
        plane.call("PATCH", CRDS, {"spec": spec}, "application/merge-patch+json")

    put(newer_crd()["spec"])
    yield
    put(crd_manifest()["spec"])


def test_fields_of_a_newer_version_survive_our_writes(
    plane: ControlPlane, store: Blocking, newer: None
) -> None:
    theirs = {"to": "come"}
    merge = "application/merge-patch+json"
    reservation = {"namespace": "a", "name": "p", "later": theirs}
    with existing(plane, "newer"):
        path = f"{GPUNODES}/newer"

        def shown() -> bool:
            spec = {"later": theirs, "reservations": {"uid-old": reservation}}
            status = {"later": theirs, "plugin": {"later": theirs, "source": "x"}}
            try:
                plane.call("PATCH", path, {"spec": spec}, merge)
                after = plane.call("PATCH", f"{path}/status", {"status": status}, merge)
            except ApiRefused as err:
                if "503" not in str(err):  # The API server is switching to the other schema.
                    raise
                return False
            return "later" in after["spec"]

        until(shown, "the new schema to be in use")
        held = store.read_gpunode("newer")
        assert held is not None
        ours = Reservation(namespace="a", name="q", attempt="1")
        reservations = {**held.spec.reservations, "uid-new": ours}
        spec = msgspec.structs.replace(held.spec, reservations=reservations, reserved="1Gi")
        after = store.write_spec(held, spec)
        flagged = msgspec.structs.replace(reservations["uid-old"], flags=["evicted"], attempt="2")
        reservations = {"uid-old": flagged}
        store.write_spec(after, msgspec.structs.replace(after.spec, reservations=reservations))
        with ApiClient(plane.configuration()) as client:
            publisher = KubernetesPublisher(of_client(client), "newer", "default", 30.0)
            for count in (1, 0):
                publisher.report(GPUNodeStatus(observed_at=STAMP, devices=[shared()] * count))
            client.rest_client.pool_manager.clear()
        found = plane.call("GET", path)
    assert found["spec"]["later"] == theirs
    assert found["spec"]["reservations"] == {
        "uid-old": {**reservation, "attempt": "2", "flags": ["evicted"]}
    }
    assert found["status"]["later"] == theirs
    assert found["status"]["plugin"] == {"later": theirs}
    assert found["status"]["devices"] == []


def test_one_gpunode_holds_the_maximum_number_of_pods_of_a_kubelet(
    plane: ControlPlane, store: Blocking, record_property: Callable[[str, object], None]
) -> None:
    """The size includes the fields that the API server adds. Each pod has 112 candidate devices."""
    most = full(112, KUBELET_PODS, 112)
    with existing(plane, "full"):
        held = store.read_gpunode("full")
        assert held is not None
        written(store, most.spec)
        assert most.status is not None
        with ApiClient(plane.configuration()) as client:
            KubernetesPublisher(of_client(client), "full", "default", 30.0).report(most.status)
            client.rest_client.pool_manager.clear()
        stored = plane.call("GET", f"{GPUNODES}/full")
    size = len(msgspec.json.encode(stored))
    line = f"GPUNode of 112 MIG devices and {KUBELET_PODS} unconfirmed pods: {size >> 10} KiB"
    record_property("measured", line)
    assert len(stored["spec"]["reservations"]) == len(stored["status"]["pods"]) == KUBELET_PODS
    assert size < ETCD_BYTES


def test_a_gpunode_too_large_for_etcd_is_not_changed(plane: ControlPlane, store: Blocking) -> None:
    with existing(plane, "full"):
        held = store.read_gpunode("full")
        assert held is not None
        few, too_large = full(2, 4, 2).spec, full(16, 1400, 16).spec
        assert len(msgspec.json.encode(too_large)) > ETCD_BYTES
        written(store, few)
        with pytest.raises((StoreRejected, OutcomeUnknown), match=r"too large|larger than max"):
            written(store, too_large)
        kept = store.read_gpunode("full")
        assert kept is not None
        assert kept.spec == few


@pytest.fixture(scope="module")
def flows(plane: ControlPlane) -> Iterator[dict[str, str]]:
    """Apply the deployed objects. Yield the names of the flow schemas and priority levels
    by UID.
    """
    manifests = list(yaml.safe_load_all((ROOT / "deploy/base/flowcontrol.yaml").read_text()))
    names: dict[str, str] = {}
    for manifest in manifests:
        made = plane.call("POST", f"{FLOWCONTROL}/{manifest['kind'].lower()}s", manifest)
        names[made["metadata"]["uid"]] = manifest["metadata"]["name"]
    yield names
    for manifest in reversed(manifests):
        name = manifest["metadata"]["name"]
        plane.call("DELETE", f"{FLOWCONTROL}/{manifest['kind'].lower()}s/{name}")


@pytest.mark.parametrize(
    ("token", "schema", "level"),
    [
        ("extender-of-the-tests", "headroom-extender", "headroom-binds"),
        ("agent-of-the-tests", "headroom-agent", "headroom-reports"),
    ],
)
def test_reports_and_binds_have_separate_priority_levels(
    plane: ControlPlane, flows: dict[str, str], token: str, schema: str, level: str
) -> None:
    http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False, timeout=PATIENCE_S)

    def served() -> tuple[str | None, str | None]:
        headers = {"Authorization": f"Bearer {token}"}
        answer = http.request("PATCH", f"{plane.url}{GPUNODES}/x/status", headers=headers)
        return (
            flows.get(answer.headers["X-Kubernetes-PF-FlowSchema-UID"]),
            flows.get(answer.headers["X-Kubernetes-PF-PriorityLevel-UID"]),
        )

    # Wait until the API server applies the objects.
    until(lambda: served() == (schema, level), "the flow", 120.0, 0.1, lambda: str(served()))
    http.clear()
