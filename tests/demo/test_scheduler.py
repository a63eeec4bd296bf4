"""The demo's scheduler calls the extender as recorded from the real kube-scheduler."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from benchmarks.demo.fleet import DemoNode, Fleet, Group, Shape
from benchmarks.demo.scheduler import HeadroomScheduler, unschedulable_message
from benchmarks.demo.wire import ServerFailed
from benchmarks.demo.workload import DemoPod
from tests.waiting import PATIENCE_S

Answer = Callable[[str, Any], tuple[int, object]]
NODES = Fleet((Group(Shape("A10", 1, 24576, 3), 3, 2),)).nodes
NAMES = [node.name for node in NODES]


@contextmanager
def extender(answer: Answer) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Serve an extender that answers with ``answer``; yield its URL and its calls in order."""
    calls: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each body waits 40 ms for an ACK

        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            calls.append((self.path, body))
            status, message = answer(self.path, body)
            payload = msgspec.json.encode(message)
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def takes_all(path: str, body: Any) -> tuple[int, object]:
    if path == "/filter":
        return 200, {"NodeNames": body["NodeNames"], "Error": ""}
    if path == "/prioritize":
        return 200, [{"Host": NAMES[1], "Score": 10}]
    return 200, {"Error": ""}


def play(
    answer: Answer, pods: int = 1, nodes: list[DemoNode] = NODES
) -> tuple[list[tuple[str, str | None]], list[tuple[str, Any]], int]:
    with extender(answer) as (url, calls):
        scheduler = HeadroomScheduler(nodes, url)
        try:
            asked = [DemoPod(f"p{i}", 1, 1024) for i in range(pods)]
            outcomes = [(o.pod.name, o.node) for o in scheduler.schedule(asked)]
        finally:
            scheduler.close()
        return outcomes, calls, scheduler.rejected_binds


def test_the_highest_score_is_bound() -> None:
    outcomes, calls, _ = play(takes_all)
    assert outcomes == [("p0", NAMES[1])]
    assert [path for path, _ in calls] == ["/filter", "/prioritize", "/bind"]
    assert calls[0][1].keys() == {"Pod", "Nodes", "NodeNames"}
    assert calls[0][1]["NodeNames"] == NAMES
    assert calls[2][1].keys() == {"PodName", "PodNamespace", "PodUID", "Node"}


def test_one_feasible_node_is_bound_without_prioritize() -> None:
    def first_only(path: str, body: Any) -> tuple[int, object]:
        return (200, {"NodeNames": NAMES[:1]}) if path == "/filter" else takes_all(path, body)

    outcomes, calls, _ = play(first_only)
    assert outcomes == [("p0", NAMES[0])]
    assert [path for path, _ in calls] == ["/filter", "/bind"]


def test_a_pod_that_fits_no_node_stays_pending() -> None:
    outcomes, calls, _ = play(lambda path, body: (200, {"NodeNames": None}))
    assert outcomes == [("p0", None)]
    assert len(calls) == 1


def test_filter_gets_only_nodes_with_a_free_replica() -> None:
    """Replicas of a chosen node count as allocated before the bind is answered."""
    outcomes, calls, _ = play(takes_all, pods=3)
    offered = [body["NodeNames"] for path, body in calls if path == "/filter"]
    assert [name in offered[2] for name in NAMES] == [True, False, True]
    assert sorted(outcomes)[:2] == [("p0", NAMES[1]), ("p1", NAMES[1])]


def test_filter_is_not_called_without_a_feasible_node() -> None:
    outcomes, calls, _ = play(takes_all, pods=3, nodes=NODES[:1])
    assert [node for _, node in outcomes].count(None) == 1
    assert [path for path, _ in calls].count("/filter") == 2


def test_a_bind_overlaps_the_next_filter() -> None:
    next_filter = threading.Event()

    def slow_bind(path: str, body: Any) -> tuple[int, object]:
        if path == "/filter" and body["Pod"]["metadata"]["name"] == "p1":
            next_filter.set()
        if path == "/bind" and body["PodName"] == "p0":
            assert next_filter.wait(PATIENCE_S), (
                "the next filter was not sent before this bind was answered"
            )
        return takes_all(path, body)

    outcomes, _, _ = play(slow_bind, pods=2)
    assert {name for name, node in outcomes if node} == {"p0", "p1"}


@pytest.mark.parametrize(
    ("rejections", "bound"),
    [pytest.param(1, NAMES[1], id="once: retried"), pytest.param(2, None, id="twice: pending")],
)
def test_a_rejected_bind_is_retried_once_from_filter(rejections: int, bound: str | None) -> None:
    left = iter(["not now"] * rejections + [""] * 9)

    def rejects(path: str, body: Any) -> tuple[int, object]:
        return (200, {"Error": next(left)}) if path == "/bind" else takes_all(path, body)

    outcomes, calls, rejected = play(rejects)
    assert outcomes == [("p0", bound)]
    assert rejected == rejections
    assert [path for path, _ in calls] == ["/filter", "/prioritize", "/bind"] * 2


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda path, body: (500, {}), id="status 500"),
        pytest.param(lambda path, body: (200, {"Error": "ledger is away"}), id="an Error"),
    ],
)
def test_a_failed_filter_raises(answer: Answer) -> None:
    with pytest.raises(ServerFailed, match="filter"):
        play(answer)


def test_the_unschedulable_message_matches_kube_scheduler() -> None:
    """As recorded from a real kube-scheduler with five nodes."""
    reason = "GPU model not allowed"
    assert unschedulable_message(dict.fromkeys("abcde", reason)) == (
        "0/5 nodes are available: 5 GPU model not allowed. preemption: 0/5 nodes are available: "
        "5 Preemption is not helpful for scheduling."
    )
    two = {"b": "insufficient VRAM", "a": "no fresh GPU metrics", "c": "insufficient VRAM"}
    assert unschedulable_message(two).startswith(
        "0/3 nodes are available: 1 no fresh GPU metrics, 2 insufficient VRAM. "
    )
