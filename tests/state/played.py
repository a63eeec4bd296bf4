"""Simulates an API server with one GPUNode, the Lease of its agent, and watches."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

import msgspec

from agent.kube_publisher import Held, NotDelivered
from headroom.contract.annotations import OBSERVED_AT
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, GPUNodeStatus, Reservation
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import Lease, ObjectMeta, Pod
from headroom.contract.watched import GPUNodeSeen, HeartbeatSeen, PodSeen
from headroom.core.cluster.changes import Event
from tests.builders import pod

T = TypeVar("T")
PROMISE = Reservation(namespace="default", name="p", since="1970-01-01T00:00:00Z")
NODE = GPUNode(
    metadata=ObjectMeta(name="n", uid="gn"),
    spec=GPUNodeSpec(initialised=True, reservations={"uid-p": PROMISE}),
)


@dataclass
class Api:
    """Stores one GPUNode and one Lease. Each write creates a version and an event for the
    watches.
    """

    versions: "itertools.count[int]" = field(default_factory=lambda: itertools.count(100))
    gpunode: GPUNode = NODE
    lease: Lease | None = None
    pod: Pod | None = field(default_factory=pod)
    #: Time on the clock of the replica that receives the events.
    at_s: float = 0.0
    #: For each kind, the events that its watch has not delivered yet.
    untold: dict[str, list[Event]] = field(
        default_factory=lambda: {"gpunodes": [], "leases": [], "pods": [PodSeen(pod())]}
    )
    #: Whether writes of the agent get no response. The test applies such writes later.
    silent: bool = False
    lingering: list[Callable[[], object]] = field(default_factory=list)

    def everything(self) -> list[Event]:
        """Return the events that a new watch receives."""
        beats = [HeartbeatSeen(self.lease, self.at_s)] if self.lease else []
        return [GPUNodeSeen(self.gpunode, self.at_s), *beats]

    # The agent calls the methods below.

    def report(self, status: GPUNodeStatus) -> Held:
        def write() -> Held:
            metadata = msgspec.structs.replace(
                self.gpunode.metadata, resource_version=str(next(self.versions))
            )
            self.gpunode = msgspec.structs.replace(self.gpunode, metadata=metadata, status=status)
            self.untold["gpunodes"].append(GPUNodeSeen(self.gpunode, self.at_s))
            return self.held()

        return self._answered(write)

    def held(self) -> Held:
        return Held(self.gpunode.metadata.uid, self.gpunode.metadata.resource_version)

    def reported(self) -> tuple[Held, str]:
        return self.held(), self.gpunode.status.observed_at if self.gpunode.status else ""

    def heartbeat(self, now: datetime, vouch: Confirmation) -> str:
        def write() -> str:
            version = str(next(self.versions))
            annotations = {OBSERVED_AT: encode_confirmation(vouch)}
            metadata = ObjectMeta(name="n", annotations=annotations, resource_version=version)
            self.lease = Lease(metadata=metadata)
            self.untold["leases"].append(HeartbeatSeen(self.lease, self.at_s))
            return version

        return self._answered(write)

    def _answered(self, write: Callable[[], T]) -> T:
        if self.silent:
            self.lingering.append(write)
            raise NotDelivered("no answer")
        return write()

    # The ledger calls the methods below.

    def read_pod(self, namespace: str, name: str) -> Pod | None:
        return self.pod

    def read_heartbeat_version(self, node: str) -> str:
        return self.lease.metadata.resource_version if self.lease else ""
