"""The in-memory store, with the writes that other programs and people make in a cluster."""

from typing import Any

from msgspec.structs import replace

from extender.ledger.embedded_store import EmbeddedStore
from headroom.contract.kube import Pod, PodStatus
from headroom.contract.watched import PodGone
from tests.builders import STAMP


class PlayedStore(EmbeddedStore):
    """A store with the Leases of agents, and with methods for what kubelets, users and
    administrators do.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        #: Maps each node to the version of its Lease.
        self.leases: dict[str, int] = {}

    def read_heartbeat_version(self, node: str) -> str:
        return self._do("read_heartbeat_version", lambda: str(self.leases.get(node, "")))

    def set_status(self, pod: Pod, status: PodStatus) -> None:
        def write() -> Pod:
            held = self._held_pod(pod.metadata.namespace, pod.metadata.name)
            return self._put_pod(replace(held, status=status), held.metadata.annotations, held.spec)

        self._do("set_status", write)

    def lose_pod(self, name: str) -> None:
        """Delete the pod by force, so that its containers may still run."""

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
