"""Builds the cluster state of idle machines, as their agents would report them, and simulates on
it.

The simulation changes how the machines share their GPUs, as a what-if of the console does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headroom.contract.annotations import DeviceChoice
from headroom.contract.gpunode import (
    SM_SOURCES,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    Replicas,
    SmActivity,
    Source,
)
from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from headroom.core.whatif.simulation import Simulation
from headroom.planner.workload import Machine

GPU = "nvidia.com/gpu"
_NEVER_STALE_S = 1e12


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the machines of a plan offer their GPUs."""

    #: Number of replicas of each GPU; 1 if it is not shared.
    replicas: int = 1
    #: Whether the agent makes the kubelet use the device that Headroom chose.
    steered: bool = False


def device_uuid(machine: Machine, index: int) -> str:
    return f"{machine.name}/{index}"


def simulation_of(
    machines: Sequence[Machine], sharing: Sharing, kinds: int
) -> tuple[Cluster, Simulation]:
    """Return the state of these machines, idle and unshared, with the stock device plugin on each,
    and a simulation on it in which they share. ``kinds`` is passed to ``Simulation``."""
    writer = ClusterWriter(Rules(), _NEVER_STALE_S, 0.0)
    writer.apply(
        event
        for machine in machines
        for event in (NodeSeen(_node(machine)), GPUNodeSeen(_gpunode(machine), 0.0))
    )
    cluster = writer.cluster
    simulation = Simulation(cluster, cluster.snapshot(), 0.0, kinds)
    if sharing.replicas > 1:
        for machine in machines:
            simulation.set_replicas(machine.name, sharing.replicas)
            if sharing.steered:
                simulation.set_device_choice(machine.name, DeviceChoice.STEERED)
    return cluster, simulation


def _node(machine: Machine) -> Node:
    return Node(
        metadata=ObjectMeta(name=machine.name, uid=machine.name),
        status=NodeStatus(allocatable={GPU: str(machine.devices)}),
    )


def _gpunode(machine: Machine) -> GPUNode:
    mig = machine.instances > 1
    devices = [
        Device(
            uuid=device_uuid(machine, index),
            index=index,
            model=machine.model,
            kind="mig" if mig else "gpu",
            parent=f"{machine.name}/gpu-{index // machine.instances}" if mig else None,
            gpu_instance=index % machine.instances if mig else None,
            memory_bytes=machine.memory_bytes,
            reserved_bytes=0,
            used_bytes=0,
            unattributed_bytes=0,
            sm_activity=SmActivity(0.0, SM_SOURCES[0]),
            sharing="none",
            resource=GPU,
            replicas=Replicas(free=1),
        )
        for index in range(machine.devices)
    ]
    plugin = Plugin(
        allocation_policy="distributed",
        device_list_strategy="envvar",
        topology_manager_policy="none",
    )
    return GPUNode(
        ObjectMeta(name=machine.name, uid=machine.name),
        spec=GPUNodeSpec(initialised=True),
        status=GPUNodeStatus(
            observed_at="1970-01-01T00:00:00Z",
            devices=devices,
            plugin=plugin,
            sources=[Source(name="checkpoint"), Source(name="proc")],
        ),
    )
