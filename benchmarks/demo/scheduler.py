"""Simulates kube-scheduler with Headroom's extender, which is called over HTTP.

Like kube-scheduler, it filters and prioritizes one pod at a time, and sends all nodes that have
enough free replicas. It skips prioritize if filter returns one node, and picks the highest score.
It does not wait for a bind, so the bind overlaps the next pod's filter. The replicas of the chosen
node count as allocated at once. After a rejected bind, the pod is scheduled once again.
"""

import select
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.demo.counting import FreeReplicas, Outcome
from benchmarks.demo.fleet import DemoNode
from benchmarks.demo.wire import Connection, ServerFailed
from benchmarks.demo.workload import NAMESPACE, DemoPod

#: Maximum number of binds in flight. kube-scheduler has no limit, but the demo needs no more.
_MAX_BINDS_IN_FLIGHT = 8


class FilterAnswer(msgspec.Struct, frozen=True, rename="pascal"):
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] | None = None
    failed_and_unresolvable_nodes: dict[str, str] | None = None
    error: str = ""

    @property
    def rejections(self) -> dict[str, str]:
        """The reason of each failed node, whether preemption could help it or not."""
        return {**(self.failed_nodes or {}), **(self.failed_and_unresolvable_nodes or {})}


class HostPriority(msgspec.Struct, frozen=True, rename="pascal"):
    host: str
    score: int


class BindAnswer(msgspec.Struct, frozen=True, rename="pascal"):
    error: str = ""


_filter_answer = msgspec.json.Decoder(FilterAnswer)
_priorities = msgspec.json.Decoder(list[HostPriority])
_bind_answer = msgspec.json.Decoder(BindAnswer)


@dataclass(frozen=True, slots=True)
class _Bind:
    pod: DemoPod
    node: str
    retried: bool


class HeadroomScheduler:
    """One kube-scheduler with the extender at ``verbs_url``. Methods raise ``ServerFailed``."""

    def __init__(self, nodes: Sequence[DemoNode], verbs_url: str) -> None:
        self._replicas = FreeReplicas(nodes)
        self._quoted = {name: msgspec.json.encode(name) for name in self._replicas.names}
        self._verbs_url = verbs_url
        self._connection = Connection(verbs_url)
        self._idle: list[Connection] = []
        self._in_flight: dict[Connection, _Bind] = {}
        #: Number of binds to which the extender returned an error.
        self.rejected_binds = 0

    def close(self) -> None:
        for connection in (self._connection, *self._idle, *self._in_flight):
            connection.close()

    def schedule(self, pods: Iterable[DemoPod]) -> Iterator[Outcome]:
        """Place the pods in order. Yield each outcome when it is decided.

        A pod whose bind was rejected is retried once, after the other pods.
        """
        queue = deque((pod, False) for pod in pods)
        while queue or self._in_flight:
            if queue:
                pod, retried = queue.popleft()
                node = self._choose(pod)
                if node is None:
                    yield Outcome(pod, None)
                else:
                    self._replicas.take(pod, node)
                    self._send_bind(_Bind(pod, node, retried))
            must_wait = not queue or len(self._in_flight) >= _MAX_BINDS_IN_FLIGHT
            for bind, error in self._answered(must_wait):
                if not error:
                    yield Outcome(bind.pod, bind.node)
                    continue
                self.rejected_binds += 1
                self._replicas.give_back(bind.pod, bind.node)
                if bind.retried:
                    yield Outcome(bind.pod, None)
                else:
                    queue.append((bind.pod, True))

    def _choose(self, pod: DemoPod) -> str | None:
        """Return the node with the highest score, or None if no node fits."""
        offered = [self._replicas.names[row] for row in self._replicas.feasible(pod).tolist()]
        if not offered:
            return None
        body = extender_args(pod, (self._quoted[name] for name in offered))
        answer = _filter_answer.decode(self._connection.call("/filter", body))
        if answer.error:
            raise ServerFailed(f"filter of {pod.name} was answered with Error: {answer.error}")
        fitting = answer.node_names or []
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        body = extender_args(pod, (self._quoted[name] for name in fitting))
        scores = _priorities.decode(self._connection.call("/prioritize", body))
        best = max(scores, key=lambda priority: priority.score, default=None)
        return fitting[0] if best is None else best.host

    def _send_bind(self, bind: _Bind) -> None:
        connection = self._open_connection()
        connection.send("/bind", binding_args(bind.pod, bind.node))
        self._in_flight[connection] = bind

    def _open_connection(self) -> Connection:
        """Return an idle connection that the server has not closed, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()
        return Connection(self._verbs_url)

    def _answered(self, must_wait: bool) -> list[tuple[_Bind, str]]:
        """Return the binds that have an answer, each with its error text, or "" if it was bound.

        With ``must_wait``, block until there is at least one such bind.
        """
        if not self._in_flight:
            return []
        ready, _, _ = select.select(list(self._in_flight), [], [], None if must_wait else 0)
        answers = []
        for connection in ready:
            bind = self._in_flight.pop(connection)
            answers.append((bind, _bind_answer.decode(connection.receive()).error))
            self._idle.append(connection)
        return answers


def extender_args(pod: DemoPod, quoted_names: Iterable[bytes]) -> bytes:
    """Return the body of filter and prioritize. The caller encodes each node name only once."""
    return b'{"Pod":%b,"Nodes":null,"NodeNames":[%b]}' % (pod.body, b",".join(quoted_names))


def binding_args(pod: DemoPod, node: str) -> bytes:
    """Return the body of bind."""
    names = {"PodName": pod.name, "PodNamespace": NAMESPACE, "PodUID": pod.uid, "Node": node}
    return msgspec.json.encode(names)


def unschedulable_message(rejections: Mapping[str, str]) -> str:
    """Return kube-scheduler's message in the pod's condition if the extender rejects all nodes.

    It is assumed that all nodes are in FailedAndUnresolvableNodes. So the message ends with the
    statement that preemption does not help.
    """
    of = f"0/{len(rejections)} nodes are available"
    counted = Counter(rejections.values())
    reasons = ", ".join(sorted(f"{count} {reason}" for reason, count in counted.items()))
    preemption = f"{len(rejections)} Preemption is not helpful for scheduling"
    return f"{of}: {reasons}. preemption: {of}: {preemption}."
