"""Dumps every input of a decision as one value, and rebuilds a cluster state from it elsewhere.

Foreign allocators, heartbeats and evictions are dumped as the facts derived from them.

The values of environment variables are omitted, because only ``NVIDIA_VISIBLE_DEVICES`` affects
decisions. For this variable the dump contains only whether it hides all devices or names some.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import TypeVar

import msgspec
import numpy as np

from headroom.contract.annotations import DEFAULT_VRAM, NO_SCHEDULER, SCHEDULER
from headroom.contract.dra import DRIVER, DeviceClass, DeviceClassSpec
from headroom.contract.gate import is_whole
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kept_fields import kept_node, kept_pod
from headroom.contract.kube import (
    Container,
    EnvVar,
    EnvVarSource,
    Namespace,
    Node,
    ObjectMeta,
    Pod,
    PodSpec,
    ResourceSlice,
    ResourceSliceSpec,
    SliceDevice,
)
from headroom.contract.reasons import Reason
from headroom.contract.watched import (
    ClassSeen,
    GPUNodeSeen,
    NamespaceSeen,
    NodeSeen,
    PodSeen,
    SliceSeen,
)
from headroom.core.cluster.changes import ActivitySeen, Event
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers.sm_activity import key_of
from headroom.core.journal.journal import Decision
from headroom.core.placement.demand_pricing import Market
from headroom.core.placement.device_reading import HISTORY, Activity
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.visible_devices import NO_DEVICES
from headroom.errors import BadSettings

C = TypeVar("C", bound=Container)

FORMAT = "headroom.gpu/snapshot/v1"
#: A time on the monotonic clock. A report received at this time is never fresh.
_LONG_AGO_S = -1e15
#: The annotation that each foreign allocator leaves on a pod that it bound.
_MARKS = {
    Reason.HAMI_MANAGES: "hami.io/vgpu-devices-allocated",
    Reason.KAI_MANAGES: "run.ai/reserve_for_gpu_index",
    Reason.GPUSHARE_MANAGES: "ALIYUN_COM_GPU_MEM_IDX",
}


class SmHistory(msgspec.Struct, frozen=True):
    """SM activity of a GPU or GPU instance, from the metrics history."""

    gpu: str
    instance: int | None
    activity: Activity


class NodeFacts(msgspec.Struct, frozen=True):
    """The objects of one node, and facts derived from other objects."""

    name: str
    node: Node | None
    gpunode: GPUNode | None
    #: When the agent sent its last heartbeat, on the clock of ``now_s``, or None before the first
    #: heartbeat.
    reported_at_s: float | None
    #: Code of the reason that names the foreign allocator of its GPUs, or None if there is none.
    manager: str | None
    #: Whether the node backs off after an eviction.
    backs_off: bool
    #: Reservations of assumed binds of this replica by pod uid.
    binding: dict[str, Reservation]
    history: list[SmHistory]


class Decided(msgspec.Struct, frozen=True):
    """The last filter call for a pod."""

    pod: Pod
    decision_id: str
    at_s: float
    snapshot_generation: int
    offered: int
    fits: int
    #: Number of nodes by the code of the reason.
    rejected: dict[str, int]


class Prices(msgspec.Struct, frozen=True):
    """``Market`` as JSON, with the price of each class of device memory."""

    unit_bytes: int
    sizes: list[int]
    prices: list[float]
    mean_bytes: float


class Head(msgspec.Struct, frozen=True):
    """The part of a dump that always differs. The other parts of equal states are equal."""

    format: str
    generated_at: str
    snapshot_generation: int
    redacted: bool
    #: Time of the dump, on the monotonic clock of the replica that wrote it.
    now_s: float
    #: Unix time at which this monotonic clock was 0.
    epoch_s: float


class Settled(msgspec.Struct, frozen=True):
    """The inputs that do not belong to a node or pod."""

    rules: Rules
    stale_after_s: float
    prices: Prices | None
    #: Annotation headroom.gpu/default-vram by namespace.
    namespaces: dict[str, str]
    #: Namespaces with a label that exempts their pods from Headroom.
    exempt: list[str] = []
    #: Extended resources that DeviceClasses serve by DRA.
    dra_resources: list[str] = []


class Inputs(msgspec.Struct, frozen=True):
    """A whole dump."""

    head: Head
    settled: Settled
    nodes: list[NodeFacts]
    pods: list[Pod]
    decisions: list[Decided]


# Dumping. Any thread may call these functions.


def settled(cluster: Cluster) -> Settled:
    """Return the rules, the prices and the defaults of namespaces."""
    market, prices = cluster.market, None
    if market is not None:
        sizes, costs = market.sizes.tolist(), market.prices.tolist()
        prices = Prices(market.unit_bytes, sizes, costs, market.mean_bytes)
    namespaces = dict(sorted(cluster.namespaces.default_vrams().items()))
    return Settled(
        cluster.rules,
        cluster.stale_after_s,
        prices,
        namespaces,
        sorted(filter(cluster.namespaces.are_exempt, cluster.namespaces.known())),
        sorted(cluster.dra_resources),
    )


def facts(cluster: Cluster, nodes: Iterable[NodeTerms]) -> Iterator[NodeFacts]:
    """Yield the facts of each node, in the order of names."""
    for terms in sorted(nodes, key=lambda terms: terms.name):
        name = terms.name
        manager, reported_at_s = cluster.manager(name), cluster.last_heartbeat_s(name)
        node = cluster.node(name)
        yield NodeFacts(
            name=name,
            node=kept_node(node) if node else None,
            gpunode=cluster.gpunode(name),
            reported_at_s=reported_at_s if isfinite(reported_at_s) else None,
            manager=manager.code if manager else None,
            backs_off=cluster.backs_off(name),
            binding=dict(sorted(cluster.holds.binding_to(name).items())),
            history=[
                SmHistory(*key_of(device.device), device.activity)
                for device in terms.devices
                if device.activity is not None and device.activity.source == HISTORY
            ],
        )


def pods(cluster: Cluster) -> Iterator[Pod]:
    """Yield the pods in the order of uids, without the values of environment variables."""
    for pod in sorted(cluster.pods(), key=lambda pod: pod.metadata.uid):
        yield without_values(pod)


def decided(decisions: Iterable[Decision]) -> Iterator[Decided]:
    """Yield the filter calls, without the values of environment variables."""
    for decision in decisions:
        yield Decided(
            pod=without_values(decision.pod),
            decision_id=decision.decision_id,
            at_s=decision.at_s,
            snapshot_generation=decision.generation,
            offered=decision.offered,
            fits=decision.fits,
            rejected={reason.code: nodes for reason, nodes in decision.rejected.items()},
        )


def without_values(pod: Pod) -> Pod:
    """Return the pod without values of environment variables, which leads to the same decisions.

    Fields that nothing reads are dropped too, because kubectl stores the whole manifest in an
    annotation.
    """
    pod = kept_pod(pod)
    spec = msgspec.structs.replace(
        pod.spec,
        containers=_without_values(pod.spec.containers),
        init_containers=_without_values(pod.spec.init_containers),
    )
    return msgspec.structs.replace(pod, spec=spec)


def _without_values(containers: list[C] | None) -> list[C] | None:
    return containers and [
        each
        if is_whole(each)
        else msgspec.structs.replace(each, env=[*map(_without_value, each.env or ())] or None)
        for each in containers
    ]


def _without_value(variable: EnvVar) -> EnvVar:
    """Return the variable with another value that leads to the same decisions."""
    if variable.value_from is not None:
        return EnvVar(name=variable.name, value_from=EnvVarSource())
    return EnvVar(name=variable.name, value="" if (variable.value or "") in NO_DEVICES else "all")


# Rebuilding a state.


def inputs_of(body: bytes, name: str) -> Inputs:
    """Decode a dump. If the content is not a dump, raise ``BadSettings`` with the file's
    ``name``."""
    try:
        inputs = msgspec.json.decode(body, type=Inputs)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise BadSettings(
            f"{name}: {err}; use the response of GET /v1/snapshot of the debug API"
        ) from err
    if inputs.head.format != FORMAT:
        raise BadSettings(
            f"{name}: its format is {inputs.head.format!r}, but this version reads {FORMAT!r}"
        )
    return inputs


def state_of(inputs: Inputs) -> Cluster:
    """Return a state with the same decisions for each pod and node as the dumped state at
    ``now_s``."""
    head, rest = inputs.head, inputs.settled
    writer = ClusterWriter(rest.rules, rest.stale_after_s, head.epoch_s)
    writer.apply(_events(inputs))
    back_offs = writer.parts.back_offs
    for each in inputs.nodes:
        if each.backs_off:
            back_offs.note(each.name, {"evicted-pod"}, head.now_s)
        else:
            back_offs.end(each.name)
    # The nodes are weighed again, because other nodes may back off now.
    writer.apply(NodeSeen(each.node) for each in inputs.nodes if each.node is not None)
    if (prices := rest.prices) is not None:
        sizes, costs = np.array(prices.sizes, np.int64), np.array(prices.prices)
        demand = writer.parts.calls.demand
        demand.market = Market(prices.unit_bytes, sizes, costs, prices.mean_bytes)
    return writer.cluster


def _events(inputs: Inputs) -> Iterator[Event]:
    settled = inputs.settled
    for name in sorted({*settled.namespaces, *settled.exempt}):
        metadata = ObjectMeta(
            name=name,
            annotations={DEFAULT_VRAM: settled.namespaces[name]}
            if name in settled.namespaces
            else None,
            labels={SCHEDULER: NO_SCHEDULER} if name in settled.exempt else None,
        )
        yield NamespaceSeen(Namespace(metadata))
    for number, resource in enumerate(settled.dra_resources):
        metadata = ObjectMeta(name=f"class-{number}")
        yield ClassSeen(DeviceClass(metadata, DeviceClassSpec(resource)))
    for pod in inputs.pods:
        yield PodSeen(pod)
    history: dict[tuple[str, int | None], Activity] = {}
    for each in inputs.nodes:
        if each.node is not None:
            yield NodeSeen(each.node)
        if each.manager is not None:
            yield _managing(each.name, each.manager)
        if each.gpunode is not None:
            yield from _reports(each, each.gpunode)
        history |= {(sm.gpu, sm.instance): sm.activity for sm in each.history}
    yield ActivitySeen(history, ())


def _reports(each: NodeFacts, gpunode: GPUNode) -> Iterator[Event]:
    # Reservations of assumed binds count like written reservations.
    reservations = {**each.binding, **gpunode.spec.reservations}
    spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
    whole = msgspec.structs.replace(gpunode, spec=spec)
    if each.reported_at_s is None or gpunode.status is None:
        yield GPUNodeSeen(whole, _LONG_AGO_S)
        return
    # The first timestamp of an agent is a heartbeat at its own time, and a changed timestamp is a
    # heartbeat at its receipt.
    before = msgspec.structs.replace(gpunode.status, observed_at="before")
    yield GPUNodeSeen(msgspec.structs.replace(whole, status=before), each.reported_at_s)
    yield GPUNodeSeen(whole, each.reported_at_s)


def _managing(node: str, code: str) -> Event:
    """Return an event from which the state detects this foreign allocator on the node."""
    reason = next(reason for reason in Reason if reason.code == code)
    if reason is Reason.DRA_MANAGES:
        spec = ResourceSliceSpec(driver=DRIVER, node_name=node, devices=[SliceDevice()])
        return SliceSeen(ResourceSlice(metadata=ObjectMeta(name=f"of-{node}"), spec=spec))
    metadata = ObjectMeta(name="of", uid=f"of-{node}", annotations={_MARKS[reason]: "0"})
    return PodSeen(Pod(metadata=metadata, spec=PodSpec(node_name=node)))
