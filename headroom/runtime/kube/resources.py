"""The kinds that are watched: their paths, decoders and events, and the state of their watches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headroom.contract.dra import DRIVER, Allocation, DeviceClass, ResourceClaim
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import GROUP, PLURAL, VERSION, GPUNode
from headroom.contract.gpunode_json import decode_gpunode, decode_reservations
from headroom.contract.kept_fields import kept_namespace, kept_node, kept_pod, unannotated
from headroom.contract.kube import (
    Lease,
    Namespace,
    Node,
    ObjectMeta,
    Pod,
    PodDisruptionBudget,
    ResourceSlice,
)
from headroom.contract.pod_limits import sized
from headroom.contract.vramprofile import PROFILE_PLURAL, VRAMProfile, decode_profile
from headroom.contract.watched import (
    BudgetGone,
    BudgetSeen,
    ClaimGone,
    ClaimSeen,
    ClassGone,
    ClassSeen,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    Listed,
    NamespaceGone,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    ProfileGone,
    ProfileSeen,
    SliceGone,
    SliceSeen,
    WatchEvent,
)

T = TypeVar("T")
KubeObject = Listed

#: Versions of DRA's API, newest first. The cluster's version and feature gates decide which
#: versions are served.
_DRA_VERSIONS = ("v1", "v1beta2", "v1beta1")


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind is listed, decoded and turned into events.

    ``seen`` and ``gone`` return the events. ``seen`` also takes the time of receipt in seconds of
    the monotonic clock. ``salvage`` returns the readable part of an object that ``decode`` rejects,
    or None. Listed objects for which ``concerns`` is false are dropped, because in a cluster with a
    hundred thousand pods, most need no GPU. Objects from a watch are kept.
    """

    name: str
    path: str
    type: type[Listed]
    decode: Callable[[msgspec.Raw], KubeObject]
    seen: Callable[[Any, float], WatchEvent]
    gone: Callable[[ObjectMeta], WatchEvent]
    salvage: Callable[[msgspec.Raw, ObjectMeta], KubeObject | None] = lambda raw, metadata: None
    concerns: Callable[[Any], bool] = lambda obj: True
    #: Other paths, tried in this order if ``path`` is not served. A kind with other paths is
    #: optional, so the server may serve none of its paths.
    other_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """The state of one kind's watch, for /readyz and the metrics."""

    kind: str
    #: Whether the first complete list of the kind has been delivered.
    synced: bool
    #: Seconds since the server last answered a call or sent data on a watch, or None before the
    #: first time.
    contact_age_s: float | None
    #: Number of watches or lists that failed and were repeated.
    reconnects: int
    #: Number of complete lists that were delivered.
    lists: int
    #: Number of objects that are currently unreadable.
    unreadable: int
    #: Why the last call failed. Empty if the call succeeded.
    error: str = ""


class _Identity(msgspec.Struct, frozen=True, rename="camel"):
    """The few fields that identify an object whose other fields are unreadable."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _Identified(msgspec.Struct, frozen=True):
    metadata: _Identity


_identity_decoder = msgspec.json.Decoder(_Identified)


def decode_identity(raw: bytes | msgspec.Raw) -> ObjectMeta:
    """Return the object's identity and version. Raises ``ValueError`` if not even these are
    readable."""
    metadata = _identity_decoder.decode(raw).metadata
    return ObjectMeta(
        name=metadata.name,
        namespace=metadata.namespace,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
    )


def _salvage_gpunode(raw: msgspec.Raw, metadata: ObjectMeta) -> GPUNode:
    """Return the GPUNode without a report, and with its reservations if they are readable.

    The report is removed, because an older report must not stay in use. If the reservations are
    unreadable, the GPUNode appears to be uninitialised, so the node takes no pods.
    """
    try:
        return decode_reservations(raw)
    except BadReport:
        return GPUNode(metadata=metadata)


def _reader(kind: type[T], keep: Callable[[T], T]) -> Callable[[msgspec.Raw], T]:
    """Return a function that decodes an object and reduces it with ``keep``."""
    decode = msgspec.json.Decoder(kind).decode
    return lambda raw: keep(decode(raw))


def _dra(resources: str) -> tuple[str, ...]:
    return tuple(f"/apis/resource.k8s.io/{version}/{resources}" for version in _DRA_VERSIONS)


def _holds_gpu(claim: ResourceClaim) -> bool:
    allocation = (claim.status and claim.status.allocation) or Allocation()
    return any(each.driver == DRIVER for each in allocation.devices.results or ())


def watched_kinds(
    lease_namespace: str, concerns: Callable[[Pod], bool] = lambda pod: True
) -> tuple[Kind, ...]:
    """Return the kinds that the extender watches.

    ``lease_namespace`` is the namespace of the agents' Leases. Listed pods for which ``concerns``
    is false are dropped.
    """
    read_node, read_namespace = _reader(Node, kept_node), _reader(Namespace, kept_namespace)
    read_pod = _reader(Pod, kept_pod)
    return (
        Kind(
            "nodes",
            "/api/v1/nodes",
            Node,
            read_node,
            lambda node, at_s: NodeSeen(node),
            lambda metadata: NodeGone(metadata.name),
        ),
        Kind(
            "namespaces",
            "/api/v1/namespaces",
            Namespace,
            read_namespace,
            lambda namespace, at_s: NamespaceSeen(namespace),
            lambda metadata: NamespaceGone(metadata.name),
        ),
        Kind(
            "gpunodes",
            f"/apis/{GROUP}/{VERSION}/{PLURAL}",
            GPUNode,
            lambda raw: unannotated(decode_gpunode(raw)),
            GPUNodeSeen,
            lambda metadata: GPUNodeGone(metadata.name),
            _salvage_gpunode,
        ),
        Kind(
            "leases",
            f"/apis/coordination.k8s.io/v1/namespaces/{lease_namespace}/leases",
            Lease,
            msgspec.json.Decoder(Lease).decode,
            HeartbeatSeen,
            lambda metadata: HeartbeatGone(metadata.name),
        ),
        Kind(
            "resourceslices",
            _dra("resourceslices")[0],
            ResourceSlice,
            _reader(ResourceSlice, unannotated),
            lambda piece, at_s: SliceSeen(piece),
            lambda metadata: SliceGone(metadata.name),
            other_paths=_dra("resourceslices")[1:],
        ),
        Kind(
            "deviceclasses",
            _dra("deviceclasses")[0],
            DeviceClass,
            _reader(DeviceClass, unannotated),
            lambda device_class, at_s: ClassSeen(device_class),
            lambda metadata: ClassGone(metadata.name),
            other_paths=_dra("deviceclasses")[1:],
        ),
        Kind(
            "resourceclaims",
            _dra("resourceclaims")[0],
            ResourceClaim,
            _reader(ResourceClaim, unannotated),
            lambda claim, at_s: ClaimSeen(claim),
            lambda metadata: ClaimGone(metadata.namespace, metadata.name),
            other_paths=_dra("resourceclaims")[1:],
            # Most claims of a cluster can be for other devices, so these claims are dropped from
            # lists.
            concerns=_holds_gpu,
        ),
        Kind(
            "poddisruptionbudgets",
            "/apis/policy/v1/poddisruptionbudgets",
            PodDisruptionBudget,
            _reader(PodDisruptionBudget, unannotated),
            lambda budget, at_s: BudgetSeen(budget),
            lambda metadata: BudgetGone(metadata.namespace, metadata.name),
        ),
        Kind(
            "pods",
            "/api/v1/pods",
            Pod,
            lambda raw: sized(read_pod(raw), len(raw)),
            lambda pod, at_s: PodSeen(pod),
            lambda metadata: PodGone(metadata.uid),
            concerns=concerns,
        ),
    )


def profile_kind() -> Kind:
    """Return the kind of VRAMProfiles, which console and webhook watch."""
    path = f"/apis/{GROUP}/{VERSION}/{PROFILE_PLURAL}"
    return Kind(
        "vramprofiles",
        path,
        VRAMProfile,
        decode_profile,
        lambda profile, at_s: ProfileSeen(profile),
        lambda metadata: ProfileGone(metadata.namespace, metadata.name),
        # The path is given twice to make the kind optional. Without its CRD there are no
        # recommendations, but everything else works.
        other_paths=(path,),
    )
