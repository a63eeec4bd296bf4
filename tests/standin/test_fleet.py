"""Checks what a client sees of stand-in nodes on a real API server."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests import waiting
from tests.controlplane import ControlPlane
from tests.driver import GIB, Driver, Gpu
from tests.kubelet.node import PODS
from tests.kubelet.node_objects import gpu_container, gpu_pod
from tests.standin.fleet import Fleet
from tests.standin.node import StandIn
from tests.standin.plugin import Settings

GRACE_S = 3


def test_a_pod_runs_and_holds_memory_until_its_processes_end(
    plane: ControlPlane, tmp_path: Path
) -> None:
    gpus, name = [Gpu("GPU-0"), Gpu("GPU-1")], f"standin-{os.urandom(4).hex()}"
    node = StandIn(gpus, Settings(2), driver=Driver(tmp_path / "devices", gpus))
    fleet = Fleet(plane, {name: node})
    pods = f"{PODS}?fieldSelector=spec.nodeName={name}"

    def until(true: Callable[[], object], what: str) -> None:
        def works() -> object:
            assert fleet.failure is None
            return true()

        waiting.until(works, what)

    def phases() -> list[str]:
        return [each["status"]["phase"] for each in plane.call("GET", pods)["items"]]

    try:
        fleet.start()
        stubborn = gpu_container("main", "stubborn", takes_bytes=GIB)
        for number in range(5):
            pod = gpu_pod(
                f"p{number}-{name}", terminationGracePeriodSeconds=GRACE_S, containers=[stubborn]
            )
            plane.call("POST", PODS, pod | {"spec": pod["spec"] | {"nodeName": name}})
        until(lambda: sorted(phases()) == ["Failed", *["Running"] * 4], "four pods run")
        assert node.used_bytes() == {"GPU-0": 2 * GIB, "GPU-1": 2 * GIB}
        began_s = time.monotonic()
        plane.call("DELETE", pods, {"gracePeriodSeconds": 0})
        until(lambda: node.used_bytes().total() == 0, "all processes have ended")
        assert time.monotonic() - began_s >= GRACE_S  # Deleting by force stops no process earlier.
    finally:
        fleet.stop()
        plane.call("DELETE", pods, {"gracePeriodSeconds": 0})
