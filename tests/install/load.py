"""Creates and deletes pods continuously, and checks the reservations without using the product's
code.
"""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.follow import Follower, Listen, Object
from tests.install.cluster import Plane, until
from tests.install.workloads import PODS, Workloads

GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"


class Load:
    """Creates pods one after another in each thread, and deletes each pod when it runs."""

    def __init__(self, workloads: Workloads, threads: int, gib: int) -> None:
        self._workloads = workloads
        self._gib = gib
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(threads)
        ]
        #: Seconds from the creation to the binding of each pod, including the webhook call.
        self.waits_s: list[float] = []
        self.failures: list[str] = []

    def start(self) -> None:
        for each in self._threads:
            each.start()

    def stop(self) -> None:
        """Stop the threads, and wait until their pods are deleted."""
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
            until(lambda: get(name)["spec"].get("nodeName"), f"{name} is bound")
        except AssertionError:
            self.failures.append(json.dumps(get(name)["status"]))
            return
        self.waits_s.append(time.monotonic() - began_s)
        until(lambda: get(name)["status"].get("phase") == "Running", f"{name} runs")
        self._workloads.delete(name)
        until(lambda: self._workloads.is_gone(name), f"{name} is gone")


class Changes:
    """Records all changes of pods and GPUNodes that the API server sends, and finds pods without
    reservations.

    A reservation must be written before its pod is bound, and removed only after the pod is gone.
    Revisions order the changes of both resources, because both are in the same etcd.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[int, Object]]] = {PODS: [], GPUNODES: []}
        #: First and last revision of the changes that a watch missed. The API server ends watches
        #: when the CRD changes.
        self._gaps: list[tuple[int, int]] = []
        #: Number of states in which the bound pods were compared with the reservations.
        self.compared = 0

    def listener(self, path: str) -> Listen:
        found = self._found[path]

        def listen(what: str, objects: Sequence[Object]) -> None:
            new = [(int(each["metadata"]["resourceVersion"]), each) for each in objects]
            if what == "LISTED":
                assert path == GPUNODES or not found, "the watch of pods missed changes"
                self._gaps.append((_last(found), _last(new)))
            found.extend(new)

        return listen

    def faults(self) -> list[str]:
        """Return the pods that were bound without a reservation, up to the last revision that both
        watches have reached.
        """
        last = min(map(_last, self._found.values()))
        changes = sorted(
            (revision, path, number)
            for path, found in self._found.items()
            for number, (revision, _) in enumerate(found)
            if revision <= last
        )
        bound: dict[tuple[str, str], str] = {}
        reserved: dict[str, set[str]] = {}
        faults: dict[str, None] = {}
        for revision, path, number in changes:
            changed = self._found[path][number][1]
            name = changed["metadata"]["name"]
            if path == GPUNODES:
                reserved[name] = set(changed.get("spec", {}).get("reservations", {}))
            elif _ends(changed):
                bound = {key: other for key, other in bound.items() if other != name}
            elif changed["spec"].get("nodeName"):
                bound[_key(changed)] = name
            if any(first < revision < end for first, end in self._gaps):
                continue
            self.compared += 1
            for (uid, node), pod in bound.items():
                if uid not in reserved.get(node, ()):
                    faults[f"{pod} on {node} has no reservation"] = None
        return [*faults]


class Judge:
    """Compares the bound pods with the reservations until ``stop`` is called."""

    def __init__(self, plane: Plane, workloads: Workloads) -> None:
        self._plane = plane
        self._workloads = workloads
        self._changes = Changes()
        self._followers = [
            Follower(plane, path, self._changes.listener(path)) for path in (GPUNODES, PODS)
        ]
        self.rounds = 0
        self.faults: list[str] = []
        self._before = residents(workloads)
        self._reserved = reservations(plane)

    def start(self) -> None:
        for each in self._followers:
            each.start()

    def stop(self) -> None:
        """Stop comparing, and check that the pods that ran at the beginning still have the same
        containers.
        """
        for each in self._followers:
            each.stop()
            if each.failure:
                raise each.failure
        self.faults = self._changes.faults()
        self.rounds = self._changes.compared
        now, reserved = residents(self._workloads), reservations(self._plane)
        for name, was in self._before.items():
            if now.get(name) != was:
                self.faults.append(f"{name} was touched: {was} is now {now.get(name)}")
            key = was["uid"], was["node"]
            if reserved.get(key) != self._reserved.get(key):
                self.faults.append(
                    f"{name}: its reservation {self._reserved.get(key)} is now {reserved.get(key)}"
                )


def _last(changes: Sequence[tuple[int, Object]]) -> int:
    return max((revision for revision, _ in changes), default=0)


def residents(workloads: Workloads) -> dict[str, Any]:
    """Return the container IDs of each running pod."""
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
    """Return all reservations by pod UID and node."""
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
