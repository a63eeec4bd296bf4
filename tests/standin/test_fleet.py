"""Checks what a client sees of stand-in nodes on a real API server."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import waiting
from tests.controlplane import ControlPlane
from tests.driver import GIB, Driver, Gpu
from tests.kubelet.node import PODS
from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod
from tests.standin.fleet import Fleet
from tests.standin.node import StandIn
from tests.standin.plugin import Settings

Start = Callable[..., Fleet]


@pytest.fixture
def start(plane: ControlPlane) -> Iterator[Start]:
    """Start a fleet, which is removed with its pods."""
    with contextlib.ExitStack() as stack:

        def begin(nodes: dict[str, StandIn], **how: Any) -> Fleet:
            fleet = Fleet(plane, nodes, **how)
            stack.callback(fleet.stop)
            for name in nodes:
                query = f"fieldSelector=spec.nodeName={name}"
                stack.callback(plane.call, "DELETE", f"{PODS}?{query}", {"gracePeriodSeconds": 0})
            fleet.start()
            return fleet

        yield begin


def bind(plane: ControlPlane, node: str, pod: dict[str, Any]) -> None:
    plane.call("POST", PODS, pod | {"spec": pod["spec"] | {"nodeName": node}})


def phases(plane: ControlPlane, node: str) -> dict[str, str]:
    listed = plane.call("GET", f"{PODS}?fieldSelector=spec.nodeName={node}")["items"]
    return {each["metadata"]["name"]: each["status"]["phase"] for each in listed}


def until(true: Callable[[], object], fleet: Fleet) -> None:
    def works() -> object:
        assert fleet.failure is None
        return true()

    waiting.until(works, "the fleet does it")


def own(count: int) -> list[str]:
    return [f"standin-{os.urandom(4).hex()}" for _ in range(count)]


def test_a_pod_runs_and_holds_memory_until_it_is_deleted(
    plane: ControlPlane, start: Start, tmp_path: Path
) -> None:
    gpus = [Gpu("GPU-0"), Gpu("GPU-1")]
    driver = Driver(tmp_path / "devices", gpus)
    (name,) = own(1)
    fleet = start({name: StandIn(gpus, Settings(2), driver=driver)})
    bind(plane, name, gpu_pod(f"a-{name}", containers=[gpu_container("main", takes_bytes=GIB)]))
    until(lambda: phases(plane, name) == {f"a-{name}": "Running"}, fleet)
    (container,) = plane.call("GET", f"{PODS}/a-{name}")["status"]["containerStatuses"]
    (resource,) = container["allocatedResourcesStatus"]
    (shown,) = resource["resources"]
    assert (resource["name"], shown["health"]) == (RESOURCE, "Healthy")
    assert shown["resourceID"] in {f"GPU-{gpu}::{n}" for gpu in range(2) for n in range(2)}
    assert f" {GIB}\n" in driver.table.read_text()
    plane.call("DELETE", f"{PODS}/a-{name}")
    until(lambda: phases(plane, name) == {}, fleet)
    until(lambda: "process" not in driver.table.read_text(), fleet)


def test_a_pod_without_a_free_replica_fails_with_the_kubelets_message(
    plane: ControlPlane, start: Start
) -> None:
    (name,) = own(1)
    fleet = start({name: StandIn([Gpu("GPU-0")], Settings(2))})
    for pod in "abc":
        bind(plane, name, gpu_pod(f"{pod}-{name}"))
    until(lambda: sorted(phases(plane, name).values()) == ["Failed", "Running", "Running"], fleet)
    (failed,) = [pod for pod, phase in phases(plane, name).items() if phase == "Failed"]
    status = plane.call("GET", f"{PODS}/{failed}")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    words = f"unavailable for {RESOURCE}. Requested: 1, Available: 0, which is unexpected"
    assert words in status["message"]

    def reasons() -> set[str]:
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={failed}"
        return {event["reason"] for event in plane.call("GET", path)["items"]}

    until(lambda: reasons() == {"UnexpectedAdmissionError"}, fleet)


def test_memory_of_a_force_deleted_pod_stays_in_use_for_a_while(
    plane: ControlPlane, start: Start, tmp_path: Path
) -> None:
    gpus = [Gpu("GPU-0")]
    driver = Driver(tmp_path / "devices", gpus)
    (name,) = own(1)
    node = StandIn(gpus, driver=driver)
    fleet = start({name: node})
    stubborn = gpu_container("main", "stubborn", takes_bytes=GIB)
    old = gpu_pod(f"old-{name}", terminationGracePeriodSeconds=3, containers=[stubborn])
    bind(plane, name, old)
    until(lambda: phases(plane, name) == {f"old-{name}": "Running"}, fleet)
    plane.call("DELETE", f"{PODS}/old-{name}", {"gracePeriodSeconds": 0})
    new = gpu_pod(f"new-{name}", containers=[gpu_container("main", takes_bytes=GIB)])
    bind(plane, name, new)
    until(lambda: phases(plane, name) == {f"new-{name}": "Running"}, fleet)
    assert node.used_bytes() == {"GPU-0": 2 * GIB}  # The second pod is on an unshared device.
    until(lambda: node.used_bytes() == {"GPU-0": GIB}, fleet)
