"""Creates and initialises GPUNodes, and completes the deletion of GPUNodes whose Nodes are gone."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
import structlog

from extender.ledger.reservations import ATTEMPTS, Reservations
from headroom.contract.annotations import FINALIZER
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, ObjectMeta, OwnerReference, Pod
from headroom.errors import (
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
    StoreTimeout,
)
from headroom.runtime.loops import part_by_part

log = structlog.get_logger()

#: Up to this number of nodes, the pods of each node are listed separately. For more nodes, all pods
#: of the cluster are listed once.
FEW_NODES = 16
#: Number of pods that are processed before the event loop serves other tasks.
AT_ONCE = 50


async def one_by_one(calls: Iterable[Awaitable[None]]) -> None:
    """Await the given calls in sequence."""
    for call in calls:
        await call


class ErrorsByNode:
    """Collects store errors that concern one node, so that the other nodes are still processed.

    Each ``with`` block handles one node. ``StoreTimeout`` is raised immediately, because a store
    that does not respond would delay all other nodes too.
    """

    def __init__(self) -> None:
        self._errors: list[StoreError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, err: BaseException | None, _where: object) -> bool:
        if not isinstance(err, StoreError) or isinstance(err, StoreTimeout):
            return False
        self._errors.append(err)
        return True

    def raise_first(self) -> None:
        """Raise the first collected error."""
        if self._errors:
            raise self._errors[0]


class Initialiser:
    """Creates and initialises GPUNodes. ``together`` awaits calls that may run concurrently."""

    def __init__(
        self,
        reservations: Reservations,
        together: Callable[[Iterable[Awaitable[None]]], Awaitable[None]] = one_by_one,
    ) -> None:
        self._reservations = reservations
        self._store = reservations.store
        self._new_id = reservations.new_id
        self._together = together
        #: Uids of uninitialised GPUNodes for which this replica has already made the Bindings in
        #: flight fail.
        self._cleared: set[str] = set()

    async def initialise(self, nodes: Iterable[Node]) -> list[str]:
        """Create missing GPUNodes and initialise them. Return the names of the GPUNodes that this
        call initialised.

        A GPUNode is initialised when its node's devices are known, because its pods cannot be
        charged before. The call may be repeated. Raises store errors, but raises an error about a
        single node only after all other nodes are done.
        """
        errors, waiting = ErrorsByNode(), list[GPUNode]()
        for node in nodes:
            with errors:
                gpunode = await self._read_or_create(node)
                if gpunode and not gpunode.spec.initialised and self._reservations.known(gpunode):
                    waiting.append(gpunode)
        made = await self._initialise(waiting, errors) if waiting else []
        errors.raise_first()
        return made

    async def _initialise(self, waiting: Sequence[GPUNode], errors: "ErrorsByNode") -> list[str]:
        # Bindings in flight have their reservations in an earlier GPUNode, which was deleted. If
        # such a Binding succeeded later, its pod would have no reservation in the new GPUNode. So
        # make all of them fail before the pods on the nodes are listed. New reservations need an
        # initialised GPUNode, so it is enough to do this once for each GPUNode.
        uids = {gpunode.metadata.uid for gpunode in waiting}
        self._cleared &= uids
        if uids - self._cleared:
            await self._touch_unbound(waiting[0])
            self._cleared |= uids
        pods_on: dict[str, list[Pod]] = {}
        names = [gpunode.name for gpunode in waiting]
        for name in names if len(names) <= FEW_NODES else (None,):
            # Each list has all pods with reservations, because no pod is bound with a reservation
            # before its node is initialised.
            async for pods in part_by_part(await self._store.list_pods(name), AT_ONCE):
                for pod in pods:
                    if pod.node and not pod.ended:
                        pods_on.setdefault(pod.node, []).append(pod)
        made: list[str] = []
        for gpunode in waiting:
            with errors:
                if await self._charge_all(gpunode, pods_on.get(gpunode.name, ())):
                    made.append(gpunode.name)
        return made

    async def _touch_unbound(self, gpunode: GPUNode) -> None:
        """Make Bindings in flight fail, by changing an annotation of each unbound pod that requests
        a GPU.

        The API server may reject the change of a pod (422, 403, a failing admission webhook). That
        does not block the node, because the pod is adopted like any unreserved pod if one of its
        Bindings succeeds later.
        """
        async for pods in part_by_part(await self._store.list_pods(node=""), 10 * AT_ONCE):
            unbound = [
                pod
                for pod in pods
                if not (pod.node or pod.ended)
                and self._reservations.adopt(pod, gpunode) is not None
            ]
            await self._together(map(self._touch, unbound))

    async def _touch(self, pod: Pod) -> None:
        try:
            await self._store.touch_pod(pod, self._new_id())
        except (StoreConflict, StoreNotFound):
            # The pod was changed or deleted after it was listed, so its Bindings fail as well.
            pass
        except StoreRejected as err:
            log.warning("pod_not_touched", pod_uid=pod.metadata.uid, message=str(err))

    async def _charge_all(self, listed: GPUNode, pods: Iterable[Pod]) -> bool:
        """Write reservations for all ``pods`` on the node, and set ``initialised``.

        Return False if this call did not initialise the GPUNode, because it was replaced, another
        replica was faster, its devices are no longer known, or all attempts lost a race. If the
        agent has written its status since ``listed`` was read, ``pods`` is still complete, because
        no replica reserves on a GPUNode before it is initialised.
        """
        gpunode: GPUNode | None = listed
        for _ in range(ATTEMPTS):
            if gpunode is None or gpunode.metadata.uid != listed.metadata.uid:
                return False
            if gpunode.spec.initialised or not self._reservations.known(gpunode):
                return False
            reservations = dict(gpunode.spec.reservations)
            for pod in pods:
                if pod.metadata.uid in reservations:
                    continue
                if (reservation := self._reservations.adopt(pod, gpunode)) is not None:
                    stamped = self._reservations.stamped(reservation, gpunode)
                    reservations[pod.metadata.uid] = stamped
            spec = msgspec.structs.replace(
                gpunode.spec, initialised=True, reservations=reservations
            )
            with suppress(StoreConflict, StoreNotFound):
                await self._reservations.write(gpunode, spec)
                return True
            gpunode = await self._store.read_gpunode(listed.name)
        return False

    async def _read_or_create(self, node: Node) -> GPUNode | None:
        name = node.metadata.name
        if (gpunode := await self._store.read_gpunode(name)) is not None:
            return gpunode
        owner = OwnerReference(api_version="v1", kind="Node", name=name, uid=node.metadata.uid)
        metadata = ObjectMeta(name=name, finalizers=[FINALIZER], owner_references=[owner])
        try:
            return await self._store.create_gpunode(GPUNode(metadata=metadata))
        except StoreConflict:
            return None  # another client created it, and the next round checks it again

    async def remove_finalizer(self, names: Iterable[str]) -> None:
        """Remove Headroom's finalizer from each named GPUNode that is being deleted, either
        together with its Node or by a user.

        The reservations of these GPUNodes are lost. This is safe, because no pod is placed on a
        node without a GPUNode, and when the node gets a new GPUNode, the pods on the node are
        charged before any pod is placed there. Raises store errors, but raises an error about a
        single node only after all other nodes are done.
        """
        errors = ErrorsByNode()
        for name in names:
            with errors:
                gpunode = await self._store.read_gpunode(name)
                if gpunode is not None and gpunode.metadata.deletion_timestamp:
                    with suppress(StoreConflict, StoreNotFound):  # the next round checks it again
                        await self._store.remove_finalizer(gpunode)
        errors.raise_first()

    async def copy_settings(self, node: str, device_choice: str, cordoned: Sequence[str]) -> bool:
        """Write settings of the Node into its GPUNode, where the agent reads them.

        Reservations stay unchanged. Changing the device choice is safe, because filter uses the
        device choice that the agent reports, and the agent changes it only when no unconfirmed pod
        depends on it. ``cordoned`` contains the UUIDs of cordoned GPUs. Return whether the GPUNode
        has these settings now. Raise all store errors except lost races.
        """
        for _ in range(ATTEMPTS):
            gpunode = await self._store.read_gpunode(node)
            if gpunode is None:
                return False
            spec = msgspec.structs.replace(
                gpunode.spec, device_choice=device_choice, cordoned=list(cordoned)
            )
            if spec == gpunode.spec:
                return True
            with suppress(StoreConflict, StoreNotFound):
                await self._reservations.write(gpunode, spec)
                return True
        return False
