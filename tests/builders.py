"""Builds test objects with defaults, so that a test passes only the values that matter."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from headroom.contract.annotations import VRAM
from headroom.contract.gate import gate_container
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
)
from headroom.contract.kube import (
    Container,
    EnvVar,
    EnvVarSource,
    FieldRef,
    InitContainer,
    Namespace,
    Node,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
)
from headroom.contract.reasons import Reason
from headroom.core.placement.device_accounting import DeviceTerms, weigh
from headroom.core.placement.fit import Verdicts, fit
from headroom.core.placement.occupancy import occupy
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest, understand
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.snapshot_builder import build

MIB = 1 << 20

__all__ = ["GIB", "GPU", "MIB", "NOW_S", "STAMP"]

GIB = 1 << 30
GPU = "nvidia.com/gpu"
#: Time on the extender's monotonic clock in these tests.
NOW_S = 1000.0
#: Time on the monotonic clock at which a report becomes stale.
FRESH_S = 1060.0
#: Value of ``observedAt`` in the reports that this module builds.
STAMP = "2026-11-21T00:00:00+00:00"


def device(uuid: str = "GPU-0", **other: Any) -> Device:
    """Return an idle, unshared 24 GiB GPU. Its only replica is free."""
    given: dict[str, Any] = {
        "memory_bytes": 24 * GIB,
        "reserved_bytes": 0,
        "used_bytes": 0,
        "unattributed_bytes": 0,
        "resource": GPU,
        "replicas": Replicas(free=1),
    }
    return Device(uuid=uuid, **{**given, **other})


def shared(uuid: str = "GPU-0", free: int = 4, allocated: int = 0, **other: Any) -> Device:
    """Return an idle 24 GiB GPU with time-sliced replicas."""
    replicas = Replicas(free=free, allocated=allocated)
    return device(uuid, **{"sharing": "time-slicing", "replicas": replicas, **other})


def mig(uuid: str, gpu_instance: int, parent: str = "GPU-0", **other: Any) -> Device:
    """Return a MIG device. Devices with the same parent and ``gpu_instance`` share their memory."""
    given = {"kind": "mig", "parent": parent, "gpu_instance": gpu_instance}
    return device(uuid, **{**given, "memory_bytes": 10 * GIB, **other})


def use(uid: str, on: str, used_bytes: int | None = 0, **other: Any) -> PodUse:
    return PodUse(uid=uid, device=on, used_bytes=used_bytes, **other)


def reservation(
    candidates: Mapping[str, int],
    count: int = 1,
    resource: str = GPU,
    name: str = "q",
    choices: Sequence[str] = (),
) -> Reservation:
    charge = Charge(
        resource=resource, count=count, candidates=dict(candidates), choices=list(choices)
    )
    return Reservation(namespace="default", name=name, charges=[charge])


def container(
    name: str = "main", gpus: int = 1, resource: str = GPU, restart_policy: str | None = None
) -> Container:
    resources = ResourceRequirements(limits={resource: str(gpus)} if gpus else {})
    return Container(name=name, resources=resources, restart_policy=restart_policy)


#: Image of the gate container that the webhook adds to pods.
GATE_IMAGE = "registry.example/headroom-agent:1"


def gate() -> InitContainer:
    """Return the gate container that the webhook adds."""
    return msgspec.convert(gate_container(GATE_IMAGE), InitContainer)


def following(of: Container, index: int = 0) -> Container:
    """Return the container with NVIDIA_VISIBLE_DEVICES set to the devices chosen for container
    ``index``.

    The value comes from the pod's annotation ``headroom.gpu/devices.<index>``.
    """
    source = EnvVarSource(
        field_ref=FieldRef(field_path=f"metadata.annotations['headroom.gpu/devices.{index}']")
    )
    return choosing(of, EnvVar(name="NVIDIA_VISIBLE_DEVICES", value_from=source))


def choosing(of: Container, variable: EnvVar | None = None) -> Container:
    """Return the container with NVIDIA_VISIBLE_DEVICES set by its author, by default to all
    devices.
    """
    given = variable or EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="all")
    return msgspec.structs.replace(of, env=[given])


def pod(
    vram: str | None = "8Gi",
    *containers: Container,
    init: Sequence[Container] = (),
    annotations: Mapping[str, str] | None = None,
    uid: str = "uid-p",
    name: str = "p",
    namespace: str = "default",
    node: str | None = None,
    phase: str = "Pending",
    version: str = "1",
    deleted: str | None = None,
    created: str | None = None,
    priority: int | None = None,
) -> Pod:
    """Return a pod, by default unbound and with one GPU container."""
    written = {**({} if vram is None else {VRAM: vram}), **(annotations or {})}
    return Pod(
        metadata=ObjectMeta(
            name=name,
            namespace=namespace,
            uid=uid,
            resource_version=version,
            annotations=written,
            deletion_timestamp=deleted,
            creation_timestamp=created,
        ),
        spec=PodSpec(
            containers=list(containers or (container(),)),
            init_containers=list(init) or None,
            node_name=node,
            priority=priority,
        ),
        status=PodStatus(phase=phase),
    )


def request(
    of: Pod | str | None = "8Gi", default_vram: str | None = None, rules: Rules | None = None
) -> VramRequest:
    """Return the request of a pod, which must be valid. A string is the value of the annotation on
    a default pod.
    """
    asked = of if isinstance(of, Pod) else pod(of)
    understood = understand(asked, default_vram, rules or Rules(gate_image=GATE_IMAGE))
    assert isinstance(understood, VramRequest), understood
    return understood


#: Default configuration of the device plugin and the kubelet. Reports of this module omit it unless
#: a test passes it.
DISTRIBUTED = Plugin(allocation_policy="distributed", topology_manager_policy="none")


def status(
    *devices: Device,
    pods: Sequence[PodUse] = (),
    observed_at: str = STAMP,
    plugin: Plugin | None = None,
) -> GPUNodeStatus:
    return GPUNodeStatus(
        observed_at=observed_at,
        devices=list(devices),
        pods=list(pods),
        plugin=plugin or Plugin(),
    )


def weighed_anew(
    report: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    reserve_bytes: int = 0,
    tolerance_bytes: int = 0,
    leaving: Set[str] = frozenset(),
    cordoned: Set[str] = frozenset(),
) -> tuple[DeviceTerms, ...]:
    """Compute the terms of a report from scratch, without the terms of an earlier report."""
    occupancy = occupy(report, reservations, leaving)
    return weigh(occupancy, report, reserve_bytes, tolerance_bytes, cordoned)


def terms(
    *devices: Device,
    pods: Sequence[PodUse] = (),
    reservations: Mapping[str, Reservation] | None = None,
    reserve_bytes: int = 0,
    tolerance_bytes: int = 64 * MIB,
    plugin: Plugin | None = None,
    leaving: Set[str] = frozenset(),
    cordoned: Set[str] = frozenset(),
) -> tuple[DeviceTerms, ...]:
    report = status(*devices, pods=pods, plugin=plugin)
    return weighed_anew(
        report, reservations or {}, reserve_bytes, tolerance_bytes, leaving, cordoned
    )


def weighed(
    *devices: Device,
    name: str = "n",
    reason: Reason | None = None,
    fresh_until_s: float = FRESH_S,
    obeys_environment: bool = True,
    **how: Any,
) -> NodeTerms:
    """Return the terms of a node. ``how`` is passed to ``terms``."""
    return NodeTerms(
        name,
        reason,
        fresh_until_s,
        terms(*devices, **how),
        obeys_environment=obeys_environment,
    )


def judged(
    what: VramRequest | Pod | str | None, *nodes: NodeTerms, now_s: float = NOW_S
) -> tuple[Snapshot, Verdicts]:
    """Return a snapshot of the nodes and the verdicts of ``fit`` in the order of the nodes."""
    snap = build(nodes)
    asked = what if isinstance(what, VramRequest) else request(what)
    return snap, fit(asked, snap, snap.rows([node.name for node in nodes]), now_s)


def reason_for(what: VramRequest | Pod | str | None, node: NodeTerms) -> Reason | None:
    return judged(what, node)[1].reason(0)


def kube_node(name: str = "n", annotations: Mapping[str, str] | None = None) -> Node:
    metadata = ObjectMeta(name=name, uid=name, annotations=annotations)
    return Node(metadata=metadata, status=NodeStatus(allocatable={GPU: "1"}))


def namespace(name: str = "default", annotations: Mapping[str, str] | None = None) -> Namespace:
    return Namespace(metadata=ObjectMeta(name=name, annotations=annotations))


def gpunode(
    *devices: Device,
    name: str = "n",
    uid: str = "gn",
    version: str = "1",
    reservations: Mapping[str, Reservation] | None = None,
    initialised: bool = True,
    pods: Sequence[PodUse] = (),
    observed_at: str = STAMP,
    plugin: Plugin | None = None,
) -> GPUNode:
    """Return a GPUNode, by default initialised. Without devices, the GPUNode has no report."""
    return GPUNode(
        metadata=ObjectMeta(name=name, uid=uid, resource_version=version),
        spec=GPUNodeSpec(initialised=initialised, reservations=dict(reservations or {})),
        status=(
            status(*devices, pods=pods, observed_at=observed_at, plugin=plugin) if devices else None
        ),
    )
