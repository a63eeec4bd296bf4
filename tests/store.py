"""The store in memory, with the writes of everything in a cluster that is not Headroom."""

from typing import Any

from msgspec.structs import replace

from extender.ledger.embedded_store import EmbeddedStore
from headroom.contract.kube import Pod, PodStatus
from headroom.contract.watched import PodGone
from tests.builders import STAMP


class PlayedStore(EmbeddedStore):
    """A store with the Leases of agents, and with actions of kubelets, users and administrators."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        #: Version of each node's Lease.
        self.leases: dict[str, int] = {}

    def read_heartbeat_version(self, node: str) -> str:
        return self._do("read_heartbeat_version", lambda: str(self.leases.get(node, "")))

    def set_status(self, pod: Pod, status: PodStatus) -> None:
        def write() -> Pod:
            held = self._held_pod(pod.metadata.namespace, pod.metadata.name)
            return self._put_pod(replace(held, status=status), held.metadata.annotations, held.spec)

        self._do("set_status", write)

    def lose_pod(self, name: str) -> None:
        """Delete the pod by force, so that it is unknown whether its containers still run."""

        def delete() -> None:
            pod = self._held_pod("default", name)
            del self._pods["default", name]
            self._deliver([PodGone(pod.metadata.uid)])

        self._do("lose_pod", delete)

    def start_deleting(self, name: str) -> None:
        """Set the deletion timestamp, as the API server does for a GPUNode with a finalizer."""

        def write() -> None:
            held = self._held(name)
            finalizers = ["headroom.gpu/ledger"]
            changed = replace(held.metadata, deletion_timestamp=STAMP, finalizers=finalizers)
            self._put_gpunode(replace(held, metadata=changed))

        self._do("start_deleting", write)
