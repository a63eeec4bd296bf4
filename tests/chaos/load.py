"""Several clients that create and delete pods all the time, each by lots of its own.

Pods of all sizes, jobs that end by themselves and services that do not, stubborn ones, some that
are replaced under their name at once, and now and then one that another scheduler binds.
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
from tests.standin.devices import RESOURCE

NAMESPACE = "chaos"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SIZES_GIB = (1, 2, 3, 4, 6, 8, 8, 12, 16, 20)


class Clients:
    """``rate`` is of pods created each second, by all clients together; each keeps at most
    ``most`` pods."""

    def __init__(
        self,
        plane: ControlPlane,
        nodes: Sequence[str],
        count: int,
        rate: float,
        most: int,
        seed: int,
    ) -> None:
        self._stopping = threading.Event()
        self.did: Counter[str] = Counter()
        self._clients = [
            _Client(plane, nodes, i, rate / count, most, random.Random(f"{seed} client {i}"))
            for i in range(count)
        ]
        self._threads = [
            threading.Thread(target=each.run, args=(self._stopping, self.did), daemon=True)
            for each in self._clients
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():  # else it was never started, or has ended
                thread.join(60.0)


class _Client:
    def __init__(
        self,
        plane: ControlPlane,
        nodes: Sequence[str],
        number: int,
        rate: float,
        most: int,
        lots: random.Random,
    ) -> None:
        self._plane, self._nodes, self._lots = plane, nodes, lots
        self._number, self._rate, self._most = number, rate, most
        self._names = itertools.count(1)
        #: Those that were created, and perhaps are there.
        self._mine: list[str] = []

    def run(self, stopping: threading.Event, did: Counter[str]) -> None:
        while not stopping.wait(self._lots.expovariate(2 * self._rate)):
            deed = self._choose()
            try:
                getattr(self, f"_{deed}")()
            except AWAY:
                did[f"{deed}, unanswered or rejected"] += 1
            else:
                did[deed] += 1

    def _choose(self) -> str:
        """Half of the time a pod is created, else one goes."""
        if len(self._mine) < self._most and (not self._mine or self._lots.random() < 0.5):
            return "bypass" if self._lots.random() < 0.08 else "create"
        return self._lots.choices(("delete", "force", "replace"), (6, 2, 2))[0]

    def _create(self, name: str = "", **spec: Any) -> None:
        if not name:
            name = f"c{self._number}-{next(self._names)}"
            self._mine.append(name)
        self._plane.call("POST", PODS, manifest(name, self._lots, **spec))

    def _bypass(self) -> None:
        """Another client binds it, whatever the ledger contains."""
        self._create(nodeName=self._lots.choice(self._nodes))

    def _delete(self) -> None:
        self._drop(self._take(), {})

    def _force(self) -> None:
        """It is gone at once, whatever its containers do."""
        self._drop(self._take(), {"gracePeriodSeconds": 0})

    def _replace(self) -> None:
        """Gone, and back under the same name with another uid."""
        name = self._take()
        self._drop(name, {"gracePeriodSeconds": 0})
        self._mine.append(name)
        self._create(name)

    def _take(self) -> str:
        """Any of them; the oldest go first more often than not."""
        index = int(len(self._mine) * self._lots.random() ** 2)
        return self._mine.pop(index)

    def _drop(self, name: str, options: dict[str, int]) -> None:
        try:
            self._plane.call("DELETE", f"{PODS}/{name}", options)
        except AWAY as err:
            if ": 404 " not in str(err):
                self._mine.append(name)
                raise


def manifest(name: str, lots: random.Random, **spec: Any) -> dict[str, Any]:
    """A pod that takes all the memory that it asks for as soon as it runs."""
    sizes = [lots.choice(SIZES_GIB)]
    text: str | None = f"{sizes[0]}Gi"
    kind = lots.random()
    if kind < 0.10:
        sizes = [lots.choice((1, 2, 3)), lots.choice((1, 2, 3))]
        text = f"c0={sizes[0]}Gi,c1={sizes[1] << 10}Mi"
    elif kind < 0.15:
        sizes, text = [6], "25%"  # of 24 GiB
    elif kind < 0.18:
        sizes, text = [0], None  # what its replica is worth
    command = lots.choices((["serve"], ["run", str(lots.randint(5, 60))], ["stubborn"]), (5, 3, 2))[
        0
    ]
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
    return {
        "metadata": {
            "name": name,
            "annotations": {} if text is None else {"headroom.gpu/vram": text},
        },
        "spec": {
            "schedulerName": SCHEDULER_NAME,
            "terminationGracePeriodSeconds": lots.randint(1, 8),
            "containers": containers,
            **spec,
        },
    }
