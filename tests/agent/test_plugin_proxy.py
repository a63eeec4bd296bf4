"""Checks that the proxy answers the kubelet in time, even if the plugin or the agent hangs."""

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.steering import plugin_proxy
from agent.steering.messages import ContainerRequest
from agent.steering.plugin_proxy import PluginProxy
from tests.waiting import PATIENCE_S, until

CHOOSING = 4

SERVICE = "v1beta1.DevicePlugin"
PLUGIN = "nvidia-gpu.sock"


def field(number: int, content: bytes) -> bytes:
    """Encode a protobuf field with its length."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def allocation(*replicas: str) -> bytes:
    """Encode an AllocateRequest for one container."""
    return field(1, b"".join(field(1, each.encode()) for each in replicas))


#: An encoded PreferredAllocationRequest for a container that needs one of two replicas.
WISH = field(1, field(1, b"G::0") + field(1, b"G::1") + b"\x18\x01")


class Plugin:
    """A plugin that returns each request as its response. Its stream sends one message and stays
    open.

    ``streams`` counts the opened streams.
    """

    def __init__(self, folder: Path) -> None:
        self.streams = 0
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(300))
        handlers = {
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._watch),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._answer),
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(self._answer),
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(self._answer),
        }
        handler = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{folder / PLUGIN}")
        self._server.start()

    def _answer(self, request: bytes, context: Any) -> bytes:
        if self.hangs.is_set():
            self.goes_on.wait(PATIENCE_S)
        return request

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        self.streams += 1
        yield b"devices"
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    def stop(self) -> None:
        self.goes_on.set()
        self._server.stop(grace=None).wait()


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    running = Plugin(tmp_path)
    yield running
    running.stop()


class Kubelet:
    """Calls the proxy without a deadline, as a kubelet does."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(f"unix:{folder / endpoint}")
        self._streams: list[Any] = []

    def call(self, method: str, request: bytes = b"") -> bytes:
        calling = self._channel.unary_unary(f"/{SERVICE}/{method}").future(request)
        answer: bytes = calling.result(timeout=PATIENCE_S)
        return answer

    def watch(self) -> None:
        """Open another stream."""
        stream = self._channel.unary_stream(f"/{SERVICE}/ListAndWatch")(b"")
        self._streams.append(stream)

    def hang_up(self) -> None:
        self._channel.close()


def between(
    folder: Path, choose: Any = lambda wanted: None, **named: Any
) -> tuple[PluginProxy, Kubelet]:
    made = PluginProxy(folder, PLUGIN, choose, **named)
    return made, Kubelet(folder, made.endpoint)


def test_many_registrations_do_not_affect_answers_and_open_no_further_stream_of_the_plugin(
    tmp_path: Path, plugin: Plugin
) -> None:
    """The plugin sends each change of health to only one of its streams, even if this stream has
    ended.
    """
    made, kubelet = between(tmp_path)
    try:
        for _ in range(200):
            kubelet.watch()
        until(lambda: made.watched, "a stream")
        assert kubelet.call("Allocate", allocation("G::0")) == allocation("G::0")
        names = [each.name for each in threading.enumerate()]
        assert [name for name in names if name.startswith(("proxy", "choosing"))] == ["proxy"]
        assert plugin.streams == 0
        kubelet.hang_up()
        until(lambda: not made.watched, "the end of all streams is noticed")
    finally:
        made.stop()


def test_a_choice_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_proxy, "ANSWER_S", 0.02)
    goes_on = threading.Event()

    def choose(wanted: ContainerRequest) -> Sequence[str] | None:
        goes_on.wait(PATIENCE_S)
        return None

    made, kubelet = between(tmp_path, choose)
    try:
        # Send more calls than there are threads for choosing.
        for _ in range(2 * CHOOSING):
            with pytest.raises(grpc.RpcError) as rejected:
                kubelet.call("GetPreferredAllocation", WISH)
            assert rejected.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not choose a GPU within 0.02 s" in rejected.value.details()
        assert kubelet.call("Allocate", allocation("G::1")) == allocation("G::1")
    finally:
        goes_on.set()
        kubelet.hang_up()
        made.stop()


def test_the_proxy_reports_that_a_pod_waits_for_an_answer(tmp_path: Path, plugin: Plugin) -> None:
    """While a pod waits, samples are delayed, because on a node with busy CPUs the answer could
    otherwise be too late.
    """
    asked, goes_on = queue.SimpleQueue[None](), threading.Event()

    def choose(wanted: ContainerRequest) -> Sequence[str] | None:
        asked.put(None)
        goes_on.wait(PATIENCE_S)
        return ["G::1"]

    made, kubelet = between(tmp_path, choose)
    try:
        assert not made.is_answering
        calling = threading.Thread(target=kubelet.call, args=("GetPreferredAllocation", WISH))
        calling.start()
        asked.get(timeout=PATIENCE_S)
        assert made.is_answering
        goes_on.set()
        calling.join()
        until(lambda: not made.is_answering, "the answer")
    finally:
        goes_on.set()
        kubelet.hang_up()
        made.stop()


def test_a_plugin_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_proxy, "PLUGIN_S", 0.1)
    made, kubelet = between(tmp_path)
    try:
        assert kubelet.call("Allocate", allocation("G::0")) == allocation("G::0")
        plugin.hangs.set()
        for method in ("Allocate", "GetPreferredAllocation", "GetDevicePluginOptions"):
            with pytest.raises(grpc.RpcError) as rejected:
                kubelet.call(method, WISH)
            assert rejected.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        kubelet.hang_up()
        made.stop()


def test_each_allocation_of_a_replica_counts_once(tmp_path: Path, plugin: Plugin) -> None:
    """An init container and the next container get the same replica."""
    now_s = 0.0
    made, kubelet = between(tmp_path, monotonic=lambda: now_s)
    try:
        for _ in range(2):
            kubelet.call("Allocate", allocation("G::0", "G::1"))
        assert made.take_passed(["G::0"])
        assert made.take_passed(["G::0", "G::1"])
        assert not made.take_passed(["G::0"])
        assert made.take_passed(["G::1"])
        kubelet.call("Allocate", allocation("G::0"))
        now_s += 121.0
        assert not made.take_passed(["G::0"])
    finally:
        kubelet.hang_up()
        made.stop()


def test_a_renamed_proxy_listens_only_under_its_new_name(tmp_path: Path, plugin: Plugin) -> None:
    made = PluginProxy(tmp_path, PLUGIN, lambda wanted: None)
    first = made.endpoint
    made.rename()
    try:
        assert made.listening
        assert first.startswith("headroom-nvidia-gpu~")
        assert [path.name for path in tmp_path.glob("headroom-*")] == [made.endpoint] != [first]
        kubelet = Kubelet(tmp_path, made.endpoint)
        assert kubelet.call("Allocate", allocation("G::0")) == allocation("G::0")
        kubelet.hang_up()
    finally:
        made.stop()
    assert not list(tmp_path.glob("headroom-*"))


def test_a_proxy_whose_calls_are_not_accepted_is_stuck(tmp_path: Path, plugin: Plugin) -> None:
    made, kubelet = between(tmp_path)
    goes_on, began = threading.Event(), queue.SimpleQueue[None]()
    try:
        assert not made.is_stuck
        made._loop.call_soon_threadsafe(lambda: (began.put(None), goes_on.wait(PATIENCE_S)))
        began.get(timeout=PATIENCE_S)
        made._monotonic = lambda beat_s=made._beat_s: beat_s + 11.0  # type: ignore[misc]
        assert made.is_stuck
    finally:
        goes_on.set()
        kubelet.hang_up()
        made.stop()
