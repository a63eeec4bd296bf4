"""A proxy between the kubelet and a device plugin.

It forwards every call and error byte for byte, except for two calls. It answers
GetPreferredAllocation with the replicas that a container should get, or forwards the call if
``choose`` returns None. ListAndWatch stays open and sends nothing, because the kubelet keeps its
own stream to the plugin and takes the devices and their health from there. The proxy opens no
stream to the plugin, because NVIDIA's plugin sends each change of health to only one stream, and
does not notice that a stream has ended. So a stream opened by the proxy would still take a change
of health away from the kubelet after the agent has stopped.

The kubelet's calls have no deadline, and the kubelet admits no other pod while it waits. So the
proxy ends every call in time, with an error if necessary.
"""

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog

from agent.probes.host_processes import identity
from agent.probes.protobuf import BadMessage
from agent.steering.messages import (
    ContainerRequest,
    allocated,
    container_requests,
    preferred,
    registration,
)

_log = structlog.get_logger()

PREFIX = "headroom-"
#: This character separates the name of the plugin's socket from a random part, which differs at
#: each registration.
_MARK = "~"

_SERVICE = "v1beta1.DevicePlugin"
_REGISTER = "/v1beta1.Registration/Register"
#: Short backoff, so that the proxy reconnects soon after the plugin has restarted.
_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
#: Timeout in seconds of calls that no pod waits for, which are registration and options.
_REGISTER_S = 10.0
#: Time limit in seconds of ``choose``.
ANSWER_S = 1.0
#: Time limit in seconds for a call of the kubelet that is forwarded to the plugin.
PLUGIN_S = 5.0
#: Number of threads for ``choose``: one for the call in progress, and the others for calls that
#: missed their deadline.
_CHOOSING = 4
#: Seconds for which an allocation through the proxy is remembered. After this time, a sample has
#: shown the allocation.
_REMEMBERED_S = 120.0
#: Seconds without activity after which the event loop is considered stuck.
_STUCK_AFTER_S = 10.0
_BEAT_EVERY_S = 1.0

T = TypeVar("T")


class Rejected(Exception):
    """The container must not get a device. The text appears in the pod's status."""


#: A function that returns the replicas that the container should get, or None if the plugin should
#: choose.
Choose = Callable[[ContainerRequest], Sequence[str] | None]


class PluginProxy:
    """The proxy of one plugin.

    It listens in ``folder`` on a socket whose name contains the name of the plugin's socket,
    ``plugin`` (see ``socket_of``). The constructor starts a thread with an event loop, and ``stop``
    ends it.
    """

    def __init__(
        self,
        folder: Path,
        plugin: str,
        choose: Choose,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plugin = plugin
        self._socket = folder / socket_of(plugin)
        self._choose = choose
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: The newest open ListAndWatch stream, which belongs to the latest registration.
        self._newest: object | None = None
        #: Times of the allocations through the proxy that no sample has shown yet, by replica. An
        #: init container and the container after it get the same replica.
        self._passed: defaultdict[str, list[float]] = defaultdict(list)
        #: Number of calls that a pod is waiting for.
        self._in_progress = 0
        self._pool = ThreadPoolExecutor(_CHOOSING, "choosing")
        self._beat_s = monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        try:
            self._await(self._begin(f"unix:{folder / plugin}"))
        except BaseException:
            self._end_thread()
            raise
        self._identity = identity(self._socket)

    @property
    def endpoint(self) -> str:
        """The file name of the proxy's socket."""
        return self._socket.name

    def rename(self) -> None:
        """Give the socket a new name, because a kubelet may remember the old name. Raises
        ``OSError``."""
        renamed = self._socket.rename(self._socket.with_name(socket_of(self._plugin)))
        self._socket, self._identity = renamed, identity(renamed)

    @property
    def listening(self) -> bool:
        """Whether the proxy's socket still exists. A kubelet removes it when it starts."""
        return self._identity is not None and identity(self._socket) == self._identity

    @property
    def watched(self) -> bool:
        """Whether the stream of the latest registration is open."""
        return self._newest is not None

    @property
    def is_stuck(self) -> bool:
        """Whether the event loop is stuck, so that only a new process helps."""
        return self._monotonic() - self._beat_s > _STUCK_AFTER_S

    @property
    def is_answering(self) -> bool:
        """Whether a pod waits for a response now."""
        return self._in_progress > 0

    def take_passed(self, replicas: Sequence[str]) -> bool:
        """Return whether all of these replicas were allocated through the proxy.

        Removes one recorded allocation of each replica, so each allocation counts only once.
        """
        since_s = self._monotonic() - _REMEMBERED_S
        known = True
        with self._lock:
            for replica in replicas:
                times = [at_s for at_s in self._passed.pop(replica, ()) if at_s >= since_s]
                known = known and bool(times)
                if times[1:]:
                    self._passed[replica] = times[1:]
        return known

    def options(self) -> bytes:
        """Return the plugin's ``DevicePluginOptions``. Raises ``grpc.RpcError``."""
        return self._await(self._call("GetDevicePluginOptions", b"", _REGISTER_S))

    def stop(self) -> None:
        """Stop the server, which makes the kubelet consider all devices of the resource gone."""
        self._await(self._end())
        self._end_thread()
        if self.listening:
            self._socket.unlink(missing_ok=True)

    async def _begin(self, plugin: str) -> None:
        self._channel = grpc.aio.insecure_channel(plugin, _CHANNEL)
        self._server = grpc.aio.server()
        self._ending = asyncio.Event()
        handlers = {
            "GetPreferredAllocation": grpc.unary_unary_rpc_method_handler(self._prefer),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._watch),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
        } | {
            method: grpc.unary_unary_rpc_method_handler(self._passing(method))
            for method in ("GetDevicePluginOptions", "PreStartContainer")
        }
        handler = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        self._beat()

    async def _end(self) -> None:
        self._ending.set()
        await self._server.stop(grace=None)
        await self._channel.close()

    def _end_thread(self) -> None:
        """End the event loop and its thread, without waiting for a late ``choose``."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _beat(self) -> None:
        """Record the time once a second while the event loop runs."""
        self._beat_s = self._monotonic()
        self._loop.call_later(_BEAT_EVERY_S, self._beat)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop from another thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * _REGISTER_S)

    async def _call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        answer: bytes = await self._channel.unary_unary(f"/{_SERVICE}/{method}")(
            request, timeout=timeout_s
        )
        return answer

    def _passing(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """Return a handler that forwards a call to the plugin, and returns its response or its
        error."""

        async def call(request: bytes, context: Any) -> bytes:
            try:
                return await self._call(method, request, PLUGIN_S)
            except grpc.RpcError as err:
                await context.abort(_code(err), _details(err))
                raise  # never reached: abort raises

        return call

    async def _allocate(self, request: bytes, context: Any) -> bytes:
        """Forward Allocate, and record the replicas if the plugin has accepted it."""
        answer = await self._passing("Allocate")(request, context)
        try:
            replicas = allocated(request)
        except BadMessage:
            replicas = []  # the plugin has accepted the request anyway
        now_s = self._monotonic()
        with self._lock:
            for replica in replicas:
                self._passed[replica].append(now_s)
        return answer

    async def _prefer(self, request: bytes, context: Any) -> bytes:
        """Answer GetPreferredAllocation, or let the plugin answer if it should choose for a
        container."""
        began_s = self._monotonic()
        self._in_progress += 1
        try:
            return await self._answer(request, context)
        finally:
            self._in_progress -= 1
            took_ms = round((self._monotonic() - began_s) * 1000)
            _log.info("preference_answered", took_ms=took_ms)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        try:
            asked = container_requests(request)
            chosen = await asyncio.wait_for(
                self._loop.run_in_executor(self._pool, self._choose_all, asked), ANSWER_S
            )
        except BadMessage as err:
            _log.warning("preference_not_understood", reason=str(err))
            chosen = [None]
        except Rejected as err:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(err))
        except TimeoutError:
            _log.warning("no_choice_in_time", answer_s=ANSWER_S)
            why = f"Headroom: the agent did not choose a GPU within {ANSWER_S:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
        known = [each for each in chosen if each is not None]
        if len(known) < len(chosen):
            return await self._passing("GetPreferredAllocation")(request, context)
        return preferred(known)

    def _choose_all(self, asked: Sequence[ContainerRequest]) -> list[Sequence[str] | None]:
        return [self._choose(request) for request in asked]

    async def _watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Keep the kubelet's stream open without sending anything, until the proxy or the kubelet
        ends it."""
        self._newest = stream = object()
        try:
            await self._ending.wait()
            if not self._ending.is_set():
                yield b""  # never reached, but makes this function a generator
        finally:
            if self._newest is stream:
                self._newest = None


def socket_of(plugin: str) -> str:
    """Return a new name for a proxy's socket, given the name of the plugin's socket.

    Example: headroom-nvidia-gpu~3f9a1c.sock for nvidia-gpu.sock.
    """
    return f"{PREFIX}{plugin.removesuffix('.sock')}{_MARK}{os.urandom(3).hex()}.sock"


def plugin_of(socket: str) -> str:
    """Return the name of the plugin's socket, given the name of a proxy's socket."""
    return socket.removeprefix(PREFIX).removesuffix(".sock").partition(_MARK)[0] + ".sock"


def register(folder: Path, endpoint: str, resource: str, options: bytes) -> None:
    """Register ``endpoint`` with the kubelet for a resource. Raises ``grpc.RpcError``.

    The kubelet lets any process register any endpoint.
    """
    with grpc.insecure_channel(f"unix:{folder / 'kubelet.sock'}") as channel:
        channel.unary_unary(_REGISTER)(
            registration(endpoint, resource, options), timeout=_REGISTER_S
        )


def options_of(folder: Path, plugin: str) -> bytes:
    """Return a plugin's encoded ``DevicePluginOptions``. Raises ``grpc.RpcError``."""
    with grpc.insecure_channel(f"unix:{folder / plugin}") as channel:
        answer: bytes = channel.unary_unary(f"/{_SERVICE}/GetDevicePluginOptions")(
            b"", timeout=_REGISTER_S
        )
        return answer


def _code(err: Any) -> Any:
    return err.code()


def _details(err: Any) -> str:
    details: str = err.details() or ""
    return details
