"""Tests the registration of a resource's proxy when its files, the plugin or the kubelet fail."""

import errno
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from agent.steering import plugin_proxy
from agent.steering.plugin_registration import NodeLock, PluginRegistration
from agent.steering.plugin_return import Patience, plugin_socket, restore
from tests.waiting import until

PREFIX = "headroom-"

RESOURCE = "nvidia.com/gpu"
HASTY = Patience(notice_s=0.02, stays_s=0.0, tries=1)


def test_creating_a_socket_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (plugin_socket(RESOURCE), "kubelet.sock"):
        (tmp_path / name).touch()
    (tmp_path / "headroom-nvidia-gpu~0.sock").mkdir()
    monkeypatch.setattr(plugin_proxy, "socket_of", lambda _: "headroom-nvidia-gpu~0.sock")
    registration = PluginRegistration(
        tmp_path,
        NodeLock(tmp_path),
        RESOURCE,
        lambda wanted: None,
        lambda _: None,
        lambda: None,
        lambda: False,
        lambda: True,
        check_every_s=0.02,
    )
    with capture_logs() as logs:
        registration.start()
        until(lambda: len(logs) >= 2, "it is tried twice")
        registration.stop()
    assert [log["event"] for log in logs[:2]] == 2 * ["steering_broken"]


@contextmanager
def answering(socket: Path, service: str, method: str, reply: bytes = b"") -> Iterator[list[bytes]]:
    """Answer every call of one method with ``reply``. Yield the list of recorded requests."""
    asked: list[bytes] = []

    def answer(request: bytes, context: object) -> bytes:
        asked.append(request)
        return reply

    with serving(socket, service, method, answer):
        yield asked


@contextmanager
def serving(
    socket: Path, service: str, method: str, answer: Callable[[bytes, object], bytes]
) -> Iterator[None]:
    """Serve one gRPC method on a Unix socket."""
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(grace=None).wait()


@pytest.mark.parametrize("healthy", [True, False, None])
def test_the_plugin_is_restored_after_a_killed_agent_whatever_the_kubelet_answers(
    healthy: bool | None, tmp_path: Path
) -> None:
    plugin = plugin_socket(RESOURCE)
    left = tmp_path / f"{PREFIX}{plugin}"
    left.touch()
    with (
        answering(tmp_path / "kubelet.sock", "v1beta1.Registration", "Register") as registered,
        answering(tmp_path / plugin, "v1beta1.DevicePlugin", "GetDevicePluginOptions"),
    ):
        restore(tmp_path, plugin, lambda _: healthy, promotes=False, patience=HASTY)
    (request,) = registered
    assert plugin.encode() in request
    assert PREFIX.encode() not in request
    assert not left.exists()


def test_a_kubelet_that_uses_the_plugin_again_by_itself_gets_no_second_registration(
    tmp_path: Path,
) -> None:
    """Kubelet 1.37 rejects a second registration, and then does not notice the end of the
    plugin.
    """
    plugin = plugin_socket(RESOURCE)
    left = tmp_path / f"{PREFIX}{plugin}"
    left.touch()
    with answering(tmp_path / "kubelet.sock", "v1beta1.Registration", "Register") as registered:
        restore(tmp_path, plugin, lambda _: True, promotes=True)
    assert not registered
    assert not left.exists()


@pytest.mark.parametrize(("kept", "registrations"), [(True, 1), (False, 2)])
def test_a_restarted_kubelet_that_keeps_the_devices_already_uses_the_plugin(
    kept: bool, registrations: int, tmp_path: Path
) -> None:
    """The kubelet's version may still be unknown, and kubelet 1.37 must not get the plugin's socket
    again.
    """
    plugin, ended = plugin_socket(RESOURCE), False
    wants_preference = b"\x10\x01"
    with (
        answering(tmp_path / "kubelet.sock", "v1beta1.Registration", "Register") as registered,
        answering(
            tmp_path / plugin, "v1beta1.DevicePlugin", "GetDevicePluginOptions", wants_preference
        ),
    ):
        registration = PluginRegistration(
            tmp_path,
            NodeLock(tmp_path),
            RESOURCE,
            lambda wanted: None,
            lambda _: kept or not ended,
            lambda: None,
            lambda: False,
            lambda: True,
            patience=HASTY,
        )
        registration.start()
        until(lambda: registered, "the proxy")
        ended = True
        registration.stop()
    assert len(registered) == registrations


def test_a_socket_that_cannot_be_removed_ends_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that may not steer has a read-only mount of the kubelet's folder."""
    plugin = plugin_socket(RESOURCE)
    (tmp_path / f"{PREFIX}{plugin}").touch()

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with (
        answering(tmp_path / "kubelet.sock", "v1beta1.Registration", "Register") as registered,
        answering(tmp_path / plugin, "v1beta1.DevicePlugin", "GetDevicePluginOptions"),
    ):
        restore(tmp_path, plugin, lambda _: True, promotes=False, patience=HASTY)
    assert len(registered) == 1


class Kubelet:
    """A kubelet 1.36 with one resource. A list from the plugin makes its devices healthy.
    ``NOTICES_S`` after the end of any stream, they become unhealthy.
    """

    NOTICES_S = 0.3

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_healthy = True
        self.proxies: list[str] = []
        #: Number of registered proxies each time that the kubelet noticed the end of a stream.
        self.noticed: list[int] = []

    def register(self, request: bytes, context: object) -> bytes:
        if found := re.search(rb"headroom-\S+?\.sock", request):
            self.proxies.append(found[0].decode())
            threading.Thread(target=self._watch, args=(self.proxies[-1],), daemon=True).start()
        else:
            self.is_healthy = True
        return b""

    def _watch(self, proxy: str) -> None:
        with grpc.insecure_channel(f"unix:{self.folder / proxy}") as channel:
            stream = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"")
            try:
                next(stream)
            except (grpc.RpcError, StopIteration):
                threading.Event().wait(self.NOTICES_S)
                self.is_healthy = False
                self.noticed.append(len(self.proxies))


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    """A kubelet, a plugin, and a registration that steers."""
    plugin = plugin_socket(RESOURCE)
    made = Kubelet(tmp_path)
    with (
        serving(tmp_path / "kubelet.sock", "v1beta1.Registration", "Register", made.register),
        answering(tmp_path / plugin, "v1beta1.DevicePlugin", "GetDevicePluginOptions", b"\x10\x01"),
    ):
        registration = PluginRegistration(
            tmp_path,
            NodeLock(tmp_path),
            RESOURCE,
            lambda wanted: None,
            lambda _: made.is_healthy,
            lambda: None,
            lambda: False,
            lambda: True,
            check_every_s=0.02,
            check_devices_every_s=0.5,
        )
        registration.start()
        try:
            until(lambda: registration.steers, "the resource is steered")
            yield made
            until(lambda: registration.steers and made.is_healthy, "the resource is steered again")
        finally:
            registration.stop(bring_plugin_back=False)


def test_devices_that_the_kubelet_dropped_without_a_visible_reason_are_restored(
    kubelet: Kubelet,
) -> None:
    kubelet.is_healthy = False
    until(lambda: kubelet.is_healthy and len(kubelet.proxies) == 2, "both are registered again")


def test_a_proxy_whose_socket_is_removed_is_replaced_after_the_kubelet_has_noticed_its_end(
    kubelet: Kubelet,
) -> None:
    (kubelet.folder / kubelet.proxies[0]).unlink()
    until(lambda: kubelet.is_healthy and len(kubelet.proxies) == 2, "both are registered again")
    assert kubelet.noticed[0] == 1
