"""Nodes with a real kubelet, NVIDIA's plugin and our agent. Only driver and runtime are simulated.

A referee reads the kubelets' allocations and the driver's memory, and compares them with the users'
requests. It is independent of ledgers, reports and placements.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.controlplane import ControlPlane
from tests.driver import GIB, Gpu
from tests.e2e.cluster import PODS, Cluster, scheduling_message
from tests.judge import excess
from tests.kubelet.node import Node, start
from tests.kubelet.node_objects import forget, gpu_container

GPU_BYTES = 24 * GIB
#: Long, because kubelets, plugins, agents and gates share a small machine. With forty runnable
#: processes on two cores, a burst of twenty gated pods took 56 s.
REAL_PATIENCE_S = 240.0
#: Reason of a pod that its kubelet rejected because no replica was free.
TURNED_AWAY = "UnexpectedAdmissionError"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result for all pods.

    ``overcommitted`` counts devices whose containers now request more memory than the device has.
    ``overdrawn`` counts devices that ever failed an allocation because all memory was in use.
    """

    pods: int
    bound: int
    rejected: int
    undecided: int
    turned_away: int
    overcommitted: int
    overdrawn: int
    #: Share of the memory of all devices that pods with a device request.
    asked_ratio: float


class RealCluster(Cluster):
    """A cluster of ``nodes`` machines with ``gpus`` devices each, shared by ``replicas``. The
    plugins use the ``device_lists`` in turn.
    """

    def __init__(
        self,
        plane: ControlPlane,
        nodes: int,
        gpus: int,
        replicas: int,
        device_lists: Sequence[str] = ("envvar",),
        agent_flags: Sequence[str] = (),
        kubelet: str = "kubelet",
    ) -> None:
        run = os.urandom(2).hex()
        names = [f"real-{run}-{i + 1:02}" for i in range(nodes)]
        super().__init__(plane, names)
        self.machines = {
            name: Node(
                plane,
                name,
                [Gpu(f"GPU-{name}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(gpus)],
                replicas,
                device_lists[number % len(device_lists)],
                kubelet=kubelet,
            )
            for number, name in enumerate(names)
        }
        self._agent_flags = agent_flags
        #: Request of the user for every pod that was ever created.
        self.asked_bytes: dict[str, int] = {}

    def create(self) -> None:
        """Create the cluster. Return when every node accepts pods, as far as its kubelet is
        concerned.
        """
        super().create()
        start(list(self.machines.values()))
        kubeconfig = self.plane.kubeconfig("agent-of-the-tests")
        for machine in self.machines.values():
            machine.start_agent(kubeconfig, *self._agent_flags)

    def close(self) -> None:
        for machine in self.machines.values():
            machine.stop()
        super().close()
        for machine in self.machines.values():
            forget(self.plane, machine.name)

    def ask(self, name: str, gib: int, gpus: int = 1, vram: str = "", **spec: Any) -> None:
        """Create a pod that requests this many GiB, and allocates them on its first GPU when it
        starts.

        ``vram`` is the annotation if it is not the amount in GiB.
        """
        self.asked_bytes[name] = gib * GIB
        spec |= {"containers": [gpu_container("main", gpus=gpus, takes_bytes=gib * GIB)]}
        self.create_pod(name, vram or f"{gib}Gi", terminationGracePeriodSeconds=1, **spec)

    def decided(self) -> bool:
        """Return whether the kubelets have started or rejected all pods bound to their nodes."""
        return all(pod["status"]["phase"] != "Pending" for pod in self.bound())

    def delete_all(self) -> None:
        """Delete every pod. Kubelets end the bound pods."""
        for pod in sorted(self.pods(), key=lambda pod: "nodeName" in pod["spec"]):
            # The garbage collector may be deleting pods of a deleted controller.
            self._unless(404, "DELETE", f"{PODS}/{pod['metadata']['name']}", {})

    def empty(self) -> None:
        """Delete every pod. Wait until the kubelets have ended them, all memory is free, and the
        extender has seen it. Pods deleted while the extender was down need two heartbeats.
        """
        self.delete_all()
        self.until(lambda: not self.pods(), "all pods are gone")
        # Until a controller is deleted, it creates pods under names that the test does not know.
        self.until(
            lambda: not any(machine.held() for machine in self.machines.values()),
            "no kubelet lists a device of a pod",
        )
        self.until(
            lambda: not any(node.spec.reservations for node in self.gpunodes()),
            "no reservation is left",
        )

    def until(
        self, true: Callable[[], bool], what: str, patience_s: float = REAL_PATIENCE_S
    ) -> None:
        """Wait for the condition, and show the state of the pods on a timeout. Fail early if a
        process of a node has ended by itself.
        """

        def true_while_processes_run() -> bool:
            for machine in self.machines.values():
                machine.raise_if_ended()
            return true()

        try:
            super().until(true_while_processes_run, what, patience_s)
        except AssertionError as err:
            raise AssertionError("\n".join([str(err), *self._story()])) from None

    def _story(self) -> Iterator[str]:
        """Return the reasons of pending pods, and the last output of each node's processes and
        gates.
        """
        for pod in self.pods():
            status = pod["status"]
            if status["phase"] == "Pending":
                node, unmet = pod["spec"].get("nodeName", "no node"), status.get("conditions", ())
                yield f"--- {pod['metadata']['name']} on {node}: " + ", ".join(
                    f"{each['type']}: {each.get('message', '')}"
                    for each in unmet
                    if each["status"] != "True"
                )
        for name, machine in self.machines.items():
            for process in ("kubelet", "agent"):
                yield f"--- {process} of {name}\n{machine.log(process)[-2000:]}"
            with machine.runtime.lock:
                commands = [each for each in machine.runtime.containers.values() if each.process]
            yield from (f"--- {each.pod} {each.name}\n{each.output}" for each in commands)

    def taken_bytes(self) -> Counter[str]:
        """Return the bytes that the pods on each device request, by the kubelets' allocations."""
        taken = Counter[str]()
        for machine in self.machines.values():
            for held in machine.held():
                taken[held.device] += self.asked_bytes[held.pod]
        return taken

    def gpus(self) -> list[Gpu]:
        return [gpu for machine in self.machines.values() for gpu in machine.driver.gpus]

    def turned_away(self) -> list[str]:
        """Return the kubelets' messages about the pods that they rejected."""
        statuses = {pod["metadata"]["name"]: pod["status"] for pod in self.pods()}
        return [
            f"{name}: {status['message']}"
            for name, status in statuses.items()
            if status.get("reason") == TURNED_AWAY
        ]

    def outcome(self) -> Outcome:
        pods, gpus, taken = self.pods(), self.gpus(), self.taken_bytes()
        bound = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
        rejected = sum(is_refused(pod) for pod in pods)
        return Outcome(
            pods=len(pods),
            bound=bound,
            rejected=rejected,
            undecided=len(pods) - bound - rejected,
            turned_away=len(self.turned_away()),
            overcommitted=len(excess(taken.items(), {g.uuid: g.memory_bytes for g in gpus})),
            overdrawn=sum(
                least < 0
                for machine in self.machines.values()
                for least in machine.driver.least_free_bytes.values()
            ),
            asked_ratio=sum(taken.values()) / sum(gpu.memory_bytes for gpu in gpus),
        )


def is_refused(pod: Mapping[str, Any]) -> bool:
    """Return whether the pod is pending with a condition that no node fits."""
    return not pod["spec"].get("nodeName") and scheduling_message(pod).startswith("0/")
