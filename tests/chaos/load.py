"""Clients that create and delete pods all the time: each draws its actions from its own seed.

Pods have all sizes. Some are jobs that end, some are stubborn, some are replaced under their name
at once, and a few are bound without Headroom.
"""

import itertools
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.kubelets import AWAY
from tests.controlplane import SCHEDULER_NAME, ControlPlane
from tests.driver import GIB
from tests.standin.allocations import RESOURCE

NAMESPACE = "chaos"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SIZES_GIB = (1, 2, 3, 4, 6, 8, 8, 12, 16, 20)
AT_ONCE = {"gracePeriodSeconds": 0}


class Client:
    """Creates ``rate`` pods per second and keeps at most ``most``."""

    def __init__(
        self,
        plane: ControlPlane,
        nodes: Sequence[str],
        name: str,
        rate: float,
        most: int,
        lots: random.Random,
    ) -> None:
        self._plane, self._nodes, self._lots = plane, nodes, lots
        self._rate, self._most = rate, most
        self._names = (f"{name}-{i}" for i in itertools.count(1))
        #: Pods that were created and probably exist.
        self._mine: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.did: Counter[str] = Counter()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(60.0)

    def _run(self) -> None:
        while not self._stopping.wait(self._lots.expovariate(2 * self._rate)):
            action = self._choose()
            try:
                self._do(action)
            except AWAY:
                action = f"{action}, failed"
            self.did[action] += 1

    def _choose(self) -> str:
        """Half of the actions create a pod."""
        if len(self._mine) < self._most and (not self._mine or self._lots.random() < 0.5):
            return "bypass" if self._lots.random() < 0.08 else "create"
        return self._lots.choices(("delete", "force", "replace"), (6, 2, 2))[0]

    def _do(self, action: str) -> None:
        if action in ("create", "bypass"):
            bound = {"nodeName": self._lots.choice(self._nodes)} if action == "bypass" else {}
            self._create(next(self._names), **bound)
            return
        # Mostly one of the oldest.
        name = self._mine.pop(int(len(self._mine) * self._lots.random() ** 2))
        try:
            self._plane.call("DELETE", f"{PODS}/{name}", {} if action == "delete" else AT_ONCE)
        except AWAY as err:
            if ": 404 " not in str(err):
                self._mine.append(name)
                raise
        if action == "replace":
            self._create(name)

    def _create(self, name: str, **spec: Any) -> None:
        self._mine.append(name)
        self._plane.call("POST", PODS, manifest(name, self._lots, **spec))


def manifest(name: str, lots: random.Random, **spec: Any) -> dict[str, Any]:
    """Return a pod that uses all the memory that it requests as soon as it runs."""
    sizes = [lots.choice(SIZES_GIB)]
    text: str | None = f"{sizes[0]}Gi"
    kind = lots.random()
    if kind < 0.10:
        sizes = [lots.choice((1, 2, 3)), lots.choice((1, 2, 3))]
        text = f"c0={sizes[0]}Gi,c1={sizes[1] << 10}Mi"
    elif kind < 0.15:
        sizes, text = [6], "25%"  # of 24 GiB
    elif kind < 0.18:
        sizes, text = [0], None  # the share of one replica
    commands = ["serve"], ["run", str(lots.randint(5, 60))], ["stubborn"]
    (command,) = lots.choices(commands, (5, 3, 2))
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
    spec |= {"terminationGracePeriodSeconds": lots.randint(1, 8)}
    annotations = {} if text is None else {"headroom.gpu/vram": text}
    return {"metadata": {"name": name, "annotations": annotations}, "spec": spec}
