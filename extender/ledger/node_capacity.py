"""Checks, just before a Binding, that no other scheduler has filled the node in the meantime.

Each scheduler learns of the binds of other schedulers through its watch. If two schedulers choose
the same node at the same moment, both pods are bound, and the kubelet rejects the second pod
(OutOfcpu). The extender's watch is not faster than kube-scheduler's watch, so the check reads from
the API server.

The check cannot see a Binding that is created after the list. docs/design/kube-scheduler.md shows
how often that happens.
"""

import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from headroom.contract.kube import Pod, Quantity
from headroom.core.rules.bound_pods import BoundPod, bound_demands, exceeded_by
from headroom.core.rules.pod_requests import Demands, demands

#: A function that lists the pods on a node that have not ended. It may raise a ``StoreError``.
ListBound = Callable[[str], Awaitable[Iterable[BoundPod]]]


class NodeCapacity:
    """Performs the check. ``allocatable`` returns the resources of a node that are checked. If the
    node is unknown, it returns None, and nothing is checked."""

    def __init__(
        self, bound: ListBound, allocatable: Callable[[str], Mapping[str, Quantity] | None]
    ) -> None:
        self._bound = bound
        self._allocatable = allocatable
        #: The requests of the pods that are being bound, by node and uid, in the order of their
        #: arrival.
        self._arriving: dict[str, dict[str, Demands]] = {}

    @contextmanager
    def arriving(self, pod: Pod, node: str) -> Iterator[None]:
        """Count the pod in the checks of later binds to the node, until this bind has ended."""
        arriving = self._arriving.setdefault(node, {})
        arriving[pod.metadata.uid] = demands(pod)
        try:
            yield
        finally:
            arriving.pop(pod.metadata.uid, None)
            if not arriving and self._arriving.get(node) is arriving:
                del self._arriving[node]

    async def exceeded(self, pod: Pod, node: str) -> bool:
        """Return whether this pod no longer fits because another scheduler has bound pods to the
        node. Raises the errors of ``bound``.

        Return False if the kubelet has accepted all pods of other schedulers, because
        kube-scheduler has counted such pods. Without this rule, a pod could wait forever if
        kube-scheduler and this check ever computed different requests.
        """
        allocatable = self._allocatable(node)
        if allocatable is None:
            return False
        uid, arriving = pod.metadata.uid, self._arriving.get(node, {})
        others = itertools.takewhile(lambda each: each[0] != uid, list(arriving.items()))
        earlier = dict(others)
        on_node = [each for each in await self._bound(node) if each.metadata.uid != uid]
        if not any(_is_news(each, pod) for each in on_node):
            return False
        taken = {each.metadata.uid: bound_demands(each) for each in on_node}
        return exceeded_by(demands(pod), {**earlier, **taken}.values(), allocatable)


def _is_news(other: BoundPod, pod: Pod) -> bool:
    return other.status.start_time is None and other.spec.scheduler_name != pod.spec.scheduler_name
