"""Runs nodes with a real kubelet, NVIDIA's device plugin and our agent. Only the driver and the
container runtime are simulated.

A referee compares the kubelets' allocations and the driver's memory with the users' requests. It
does not read reservations, reports or placements.
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
#: The timeout is long because all processes of the nodes share a small machine. With forty runnable
#: processes on two cores, a burst of twenty gated pods took 56 s.
REAL_PATIENCE_S = 240.0
#: Status reason of a pod that its kubelet rejected because no replica was free.
TURNED_AWAY = "UnexpectedAdmissionError"
#: Parts of a kubelet's message about a pod whose agent did not answer in time.
LATE = "the ledger cannot be read", "the agent did not choose a GPU within"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run for all pods.

    ``overcommitted`` counts devices whose containers request more memory than the device has.
    ``overdrawn`` counts devices on which an allocation has ever failed because all memory was in
    use.
    """

    pods: int
    bound: int
    rejected: int
    undecided: int
    turned_away: int
    overcommitted: int
    overdrawn: int
    #: Memory that pods with a device request, as a share of the memory of all devices.
    asked_ratio: float


class RealCluster(Cluster):
    """A cluster of ``nodes`` machines with ``gpus`` devices each. Each device has ``replicas``
    replicas. The device plugins use the ``device_lists`` strategies in turn.
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
        #: The bytes that the user requested for each pod that was ever created.
        self.asked_bytes: dict[str, int] = {}

    def create(self) -> None:
        """Create the cluster, and wait until every kubelet accepts pods."""
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
        """Create a pod that requests ``gib`` GiB and allocates this amount on its first GPU when it
        starts.

        ``vram`` is the value of the annotation. By default, it is the amount in GiB.
        """
        self.asked_bytes[name] = gib * GIB
        spec |= {"containers": [gpu_container("main", gpus=gpus, takes_bytes=gib * GIB)]}
        self.create_pod(name, vram or f"{gib}Gi", terminationGracePeriodSeconds=1, **spec)

    def decided(self) -> bool:
        """Return whether the kubelets have started or rejected all pods bound to their nodes."""
        return all(pod["status"]["phase"] != "Pending" for pod in self.bound())

    def delete_all(self) -> None:
        """Delete every pod. The kubelets end the bound pods."""
        for pod in sorted(self.pods(), key=lambda pod: "nodeName" in pod["spec"]):
            # The garbage collector may already have deleted the pods of a deleted controller.
            self._unless(404, "DELETE", f"{PODS}/{pod['metadata']['name']}", {})

    def empty(self) -> None:
        """Delete every pod. Wait until the kubelets have ended the pods, all memory is free, and
        the extender has removed the reservations. If pods were deleted while the extender was down,
        this takes two heartbeats.
        """
        self.delete_all()
        self.until(lambda: not self.pods(), "all pods are gone")
        # Check the machines, because a controller creates pods with names that the test does not
        # know until the controller is deleted.
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
        """Wait for the condition. If it times out, show the state of the pods. Fail early if a
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
        """Yield the reasons of pending pods, and the last output of each node's processes and
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
        """Return the bytes that pods request on each device, according to the kubelets'
        allocations.
        """
        taken = Counter[str]()
        for machine in self.machines.values():
            for held in machine.held():
                taken[held.device] += self.asked_bytes[held.pod]
        return taken

    def gpus(self) -> list[Gpu]:
        return [gpu for machine in self.machines.values() for gpu in machine.driver.gpus]

    def late_answers(self) -> list[str]:
        """Return the kubelets' messages about pods whose agent did not answer in time.

        A kubelet rejects a pod if the agent has not read the ledger and chosen a GPU within a
        second. On a busy machine, the API server or the agent may take longer.
        """
        return [each for each in self.turned_away() if any(late in each for late in LATE)]

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
    """Return whether the pod is pending and has the condition that no node fits."""
    return not pod["spec"].get("nodeName") and scheduling_message(pod).startswith("0/")
