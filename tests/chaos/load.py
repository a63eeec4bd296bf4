"""Runs clients that create and delete pods continuously. Each client chooses its actions from its
own seed.

Pods have many sizes. Some pods are jobs that end, some use their whole grace period, some are
replaced immediately under the same name, and a few are bound without Headroom.
"""

import contextlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

import urllib3

from tests.controlplane import SCHEDULER_NAME, ApiRefused, ControlPlane
from tests.driver import GIB
from tests.standin.allocations import RESOURCE
from tests.threads import Repeated

NAMESPACE = "chaos"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SIZES_GIB = (1, 2, 3, 4, 6, 8, 8, 12, 16, 20)
#: Number of pods that all clients together create per second, and number of clients.
RATE, CLIENTS = 4.0, 3
AT_ONCE = {"gracePeriodSeconds": 0}
#: Exceptions that are expected while the API server is down.
AWAY = (ApiRefused, urllib3.exceptions.HTTPError, OSError)


class Client(Repeated):
    """Creates ``RATE / CLIENTS`` pods per second, and keeps at most ``most`` pods."""

    def __init__(
        self,
        plane: ControlPlane,
        nodes: Sequence[str],
        name: str,
        most: int,
        rng: random.Random,
    ) -> None:
        super().__init__()
        self._plane, self._nodes, self._rng = plane, nodes, rng
        self._most = most
        self._names = (f"{name}-{i}" for i in itertools.count(1))
        #: Pods that this client created and that probably still exist.
        self._mine: list[str] = []

    def step(self) -> float:
        """Create or delete a pod. Half of the actions create a pod."""
        may_create = len(self._mine) < self._most
        with contextlib.suppress(*AWAY):
            if may_create and (not self._mine or self._rng.random() < 0.5):
                bypass = self._rng.random() < 0.08
                bound = {"nodeName": self._rng.choice(self._nodes)} if bypass else {}
                self._create(next(self._names), **bound)
            else:
                self._remove(self._rng.choices(("delete", "force", "replace"), (6, 2, 2))[0])
        return self._rng.expovariate(2 * RATE / CLIENTS)

    def _remove(self, how: str) -> None:
        # Usually, delete one of the oldest pods.
        name = self._mine.pop(int(len(self._mine) * self._rng.random() ** 2))
        try:
            self._plane.call("DELETE", f"{PODS}/{name}", {} if how == "delete" else AT_ONCE)
        except AWAY as err:
            if ": 404 " not in str(err):
                self._mine.append(name)
                raise
        if how == "replace":
            self._create(name)

    def _create(self, name: str, **spec: Any) -> None:
        self._mine.append(name)
        self._plane.call("POST", PODS, manifest(name, self._rng, **spec))


def manifest(name: str, rng: random.Random, **spec: Any) -> dict[str, Any]:
    """Return a pod that allocates its complete request when it runs."""
    gib, small = rng.choice(SIZES_GIB), [rng.choice((1, 2, 3)) for _ in range(2)]
    kinds: tuple[tuple[str | None, list[int]], ...] = (
        (f"{gib}Gi", [gib]),
        (f"c0={small[0]}Gi,c1={small[1] << 10}Mi", small),
        ("25%", [6]),  # of 24 GiB
        (None, [0]),  # the share of one replica
    )
    ((vram, sizes),) = rng.choices(kinds, (82, 10, 5, 3))
    commands = ["serve"], ["run", str(rng.randint(5, 60))], ["stubborn"]
    (command,) = rng.choices(commands, (5, 3, 2))
    containers = [
        {
            "name": f"c{index}",
            "image": "none",
            "command": command,
            "env": [{"name": "TAKES_VRAM", "value": str(gib * GIB)}],
            "resources": {"limits": {"cpu": "100m", "memory": "64Mi", RESOURCE: "1"}},
        }
        for index, gib in enumerate(sizes)
    ]
    spec |= {"schedulerName": SCHEDULER_NAME, "containers": containers}
    spec |= {"terminationGracePeriodSeconds": rng.randint(1, 8)}
    annotations = {} if vram is None else {"headroom.gpu/vram": vram}
    return {"metadata": {"name": name, "annotations": annotations}, "spec": spec}
