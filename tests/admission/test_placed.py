"""Checks a user's pod from creation to the variables of its containers. An unmodified
kube-scheduler and the extender place it. Both use one service account, and all policies are in
force.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import GPUNodeStatus, Source
from tests.admission.reviews import container, manifest
from tests.admission.site import AGENT, EXTENDER, GPUNODES, NODES, PODS, Site, installed
from tests.builders import DISTRIBUTED, GIB, GPU, shared
from tests.controlplane import ControlPlane, built, scheduler_configuration
from tests.kubernetes_version import scheduler_flags
from tests.waiting import until

HERE, OTHER = NODES
PLAIN = "admission-plain"


@pytest.fixture(scope="module")
def site(plane: ControlPlane) -> Iterator[Site]:
    """A cluster with a node that has two shared GPUs, an empty node, a scheduler and a webhook."""
    with installed(plane) as site:
        for role in ("system:kube-scheduler", "system:volume-scheduler"):
            site.bind(role, EXTENDER)
        amounts = {"cpu": "4", "memory": "64Gi", "pods": "100"}
        for node, gpus in ((HERE, {GPU: "8"}), (OTHER, {})):
            held = {**amounts, **gpus}
            status = {"status": {"capacity": held, "allocatable": held}}
            plane.call("PATCH", f"/api/v1/nodes/{node}/status", status)
        site.serve()
        start_scheduler(site)
        try:
            until(lambda: site.send("GET", f"{GPUNODES}/{HERE}").status == 200, "it has a GPUNode")
            report(site)
            yield site
        finally:
            plane.kill("admission-scheduler")


def report(site: Site) -> None:
    """Write a report as the node's agent does."""
    status = GPUNodeStatus(
        observed_at=datetime.now(UTC).isoformat(),
        devices=[shared("GPU-a"), shared("GPU-b", used_bytes=4 * GIB, unattributed_bytes=4 * GIB)],
        plugin=DISTRIBUTED,
        sources=[Source(name="checkpoint"), Source(name="proc")],
    )
    body = {"status": msgspec.to_builtins(status)}
    path = f"{GPUNODES}/{HERE}/status"
    assert site.send("PATCH", path, body, site.token(AGENT, HERE)).status == 200

    def is_initialised() -> bool:
        return bool(site.send("GET", f"{GPUNODES}/{HERE}").body.get("spec", {}).get("initialised"))

    until(is_initialised, "the node takes pods")


def start_scheduler(site: Site) -> None:
    """Start kube-scheduler with the account of the extender, because both run in the same pod."""
    plane = site.plane
    kubeconfig = plane.folder / "admission-scheduler.kubeconfig"
    plane.write_kubeconfig(kubeconfig, {"token": site.token(EXTENDER)})
    content = scheduler_configuration(site.verbs_url, kubeconfig)
    config = plane.folder / "admission-scheduler.json"
    config.write_bytes(msgspec.json.encode(content))
    binary = str(built("kube-scheduler")["kube-scheduler"])
    flags = f"--config={config}", "--secure-port=0", *scheduler_flags("kube-scheduler")
    plane.spawn("admission-scheduler", binary, *flags)


def create(site: Site, name: str, obj: dict[str, Any]) -> None:
    obj["metadata"]["name"] = name
    reply = site.send("POST", PODS, obj)
    assert reply.status == 201, reply


def pod(site: Site, name: str) -> dict[str, Any]:
    return site.send("GET", f"{PODS}/{name}").body


def bound(site: Site, name: str) -> bool:
    return bool(pod(site, name)["spec"].get("nodeName"))


def condition(site: Site, name: str) -> str:
    conditions = pod(site, name).get("status", {}).get("conditions") or ({},)
    shown: str = conditions[0].get("message", "")
    return shown


def test_a_pod_with_one_annotation_gets_a_share_of_a_device(site: Site) -> None:
    """The variables take their values from annotations that the Binding adds."""
    wishes = {"headroom.gpu/share": "env"}
    create(site, "p", manifest("6Gi", container("side", 0), container(), annotations=wishes))
    until(lambda: bound(site, "p"), "it is bound")
    placed = pod(site, "p")
    followed = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"].split("'")[1]
        for each in placed["spec"]["containers"][1]["env"]
    }
    annotations = placed["metadata"]["annotations"]
    assert {name: annotations[key] for name, key in followed.items()} == {
        "HEADROOM_VRAM_BYTES": str(6 * GIB),
        "HEADROOM_VRAM_FRACTION": "0.2500",
    }


def test_the_reason_of_a_pending_pod_is_written_under_the_policies(site: Site) -> None:
    create(site, "large", manifest("30Gi"))
    until(lambda: bool(condition(site, "large")), "kube-scheduler reports why it waits")
    assert "insufficient GPU memory on any device" in condition(site, "large")


def test_kube_scheduler_evicts_victims_under_the_policies(site: Site) -> None:
    """kube-scheduler marks the victim's status before it deletes the victim, and it nominates the
    preemptor.
    """
    site.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": PLAIN}, "value": 1000}
    )
    cpus = {"resources": {"requests": {"cpu": "3"}}, "name": "main", "image": "none"}
    for name in ("low-a", "low-b"):
        create(site, name, manifest(None, cpus, schedulerName="headroom"))
    until(lambda: bound(site, "low-a") and bound(site, "low-b"), "the nodes are full")
    create(site, "high", manifest(None, cpus, schedulerName="headroom", priorityClassName=PLAIN))

    def victims() -> list[str]:
        return [n for n in ("low-a", "low-b") if "deletionTimestamp" in pod(site, n)["metadata"]]

    until(victims, "one is being deleted")
    (victim,) = victims()
    marks = {each["type"]: each for each in pod(site, victim)["status"]["conditions"]}
    assert marks["DisruptionTarget"]["reason"] == "PreemptionByScheduler"
    site.send("DELETE", f"{PODS}/{victim}", {"gracePeriodSeconds": 0})
    until(lambda: bound(site, "high"), "the other is bound")


def test_the_policies_rejected_no_request(site: Site) -> None:
    for process in ("admission-scheduler", "admission-extender"):
        log = site.plane.log(process)
        assert "ValidatingAdmissionPolicy" not in log, log[-3000:]
