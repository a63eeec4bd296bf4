"""Pods that come and go, and a judge who uses nothing of the product's code."""

import json
import threading
import time
from typing import Any

from tests.install.cluster import Plane, until
from tests.install.workloads import Workloads

GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
_MOST_FAULTS = 20


class Load:
    """Creates pods, each of which is deleted when it runs: one after the other in each thread."""

    def __init__(self, workloads: Workloads, threads: int, gib: int) -> None:
        self._workloads = workloads
        self._gib = gib
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(threads)
        ]
        #: For each pod, the seconds from its creation to its bind, webhook included.
        self.waits_s: list[float] = []
        self.failures: list[str] = []

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """Return when the pods of the load are gone."""
        self._stop.set()
        for each in self._threads:
            each.join()

    def _run(self, number: int) -> None:
        count = 0
        try:
            while not self._stop.is_set():
                self._one(f"load-{number}-{count}")
                count += 1
        except Exception as err:
            self.failures.append(repr(err))
            raise

    def _one(self, name: str) -> None:
        began_s = time.monotonic()
        self._workloads.create(name, self._gib)
        get = self._workloads.get
        try:
            until(lambda: get(name)["spec"].get("nodeName"), f"{name} is bound", 60.0)
        except AssertionError:
            self.failures.append(json.dumps(get(name)["status"]))
            return
        self.waits_s.append(time.monotonic() - began_s)
        until(lambda: get(name)["status"].get("phase") == "Running", f"{name} runs", 60.0)
        self._workloads.delete(name)
        until(lambda: name not in names(self._workloads.all()), f"{name} is gone", 60.0)


class Judge(threading.Thread):
    """Compares the bound pods with the reservations, as the API server shows both, all the time.

    A reservation is written before its pod is bound, and removed after the pod is gone. So each pod
    that is bound before and after the reservations are read must have one, on its node.
    """

    def __init__(self, plane: Plane, workloads: Workloads) -> None:
        super().__init__()
        self._plane = plane
        self._workloads = workloads
        self._end = threading.Event()
        self.rounds = 0
        self.faults: list[str] = []
        self._before = residents(workloads)
        self._reserved = reservations(plane)

    def run(self) -> None:
        try:
            self._compare()
        except Exception as err:
            self.faults.append(f"the judge failed: {err!r}")
            raise

    def _compare(self) -> None:
        while not self._end.wait(0.1) and len(self.faults) < _MOST_FAULTS:
            bound = {_key(pod): pod for pod in self._workloads.bound()}
            reserved = reservations(self._plane)
            after = {_key(p) for p in self._workloads.bound() if not _ends(p)}
            self.faults += [
                f"{bound[key]['metadata']['name']} on {key[1]} has no reservation"
                for key in bound.keys() & after - reserved.keys()
            ]
            self.rounds += 1

    def stop(self) -> None:
        """End, and compare the pods that ran from the beginning with what they were."""
        self._end.set()
        self.join()
        now, reserved = residents(self._workloads), reservations(self._plane)
        for name, was in self._before.items():
            if now.get(name) != was:
                self.faults.append(f"{name} was touched: {was} is now {now.get(name)}")
            key = was["uid"], was["node"]
            if reserved.get(key) != self._reserved.get(key):
                self.faults.append(
                    f"{name}: its reservation {self._reserved.get(key)} is now {reserved.get(key)}"
                )


def residents(workloads: Workloads) -> dict[str, Any]:
    """Return what identifies the containers of each running pod, by the pod's name."""
    return {
        pod["metadata"]["name"]: {
            "uid": pod["metadata"]["uid"],
            "node": pod["spec"]["nodeName"],
            "annotations": pod["metadata"]["annotations"],
            "containers": [
                (each["containerID"], each["restartCount"], each["state"])
                for each in pod["status"]["containerStatuses"]
            ],
        }
        for pod in workloads.running()
        if not _ends(pod)
    }


def reservations(plane: Plane) -> dict[tuple[str, str], Any]:
    """Return the reservation of each pod, by the pod's uid and the node."""
    return {
        (uid, gpunode["metadata"]["name"]): reservation
        for gpunode in plane.call("GET", GPUNODES)["items"]
        for uid, reservation in gpunode.get("spec", {}).get("reservations", {}).items()
    }


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def _key(pod: dict[str, Any]) -> tuple[str, str]:
    return pod["metadata"]["uid"], pod["spec"]["nodeName"]


def _ends(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]
