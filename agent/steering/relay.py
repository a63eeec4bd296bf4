"""A device plugin that is none: the kubelet asks it, and the plugin behind it answers.

Every message passes as it came, byte for byte, errors included. One call is answered here:
GetPreferredAllocation, by which a plugin names the replicas that it would like a container to get;
and that one too is passed on where ``choose`` has no opinion.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import structlog

from agent.kubelet.protobuf import BadMessage
from agent.steering.messages import Wish, allocated, preferred, registration, wishes

_log = structlog.get_logger()

PREFIX = "headroom-"

_SERVICE = "v1beta1.DevicePlugin"
_REGISTER = "/v1beta1.Registration/Register"
#: A plugin that was restarted is found again this soon.
_CHANNEL = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
_PATIENCE_S = 10.0
_NEVER_S = 86_400.0
#: Streams are one for each registration with the kubelet; calls come one after the other.
_THREADS = 64


class Refused(Exception):
    """Nobody may be given a device; the text reaches the pod's status."""


#: Of the replicas that are free, those that the container should get; None: as the plugin likes.
Choose = Callable[[Wish], Sequence[str] | None]


class Relay:
    """Listens beside ``plugin``, a socket in ``folder``, under a name that tells whose it is."""

    def __init__(self, folder: Path, plugin: str, choose: Choose) -> None:
        self.endpoint = PREFIX + plugin
        self._socket = folder / self.endpoint
        self._choose = choose
        self._lock = threading.Lock()
        #: Of the streams to the kubelet the one that began last: it is of the latest registration.
        self._newest: object | None = None
        #: Replicas that were allocated through us and that nobody has looked for yet.
        self._passed: set[str] = set()
        self._socket.unlink(missing_ok=True)
        self._channel = grpc.insecure_channel(f"unix:{folder / plugin}", _CHANNEL)
        self._server = grpc.server(ThreadPoolExecutor(_THREADS, "relay"))
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
        self._server.start()
        self._identity = identity(self._socket)

    @property
    def listening(self) -> bool:
        """False once somebody has removed the socket, as a kubelet does that starts."""
        return self._identity is not None and identity(self._socket) == self._identity

    @property
    def watched(self) -> bool:
        """Whether the stream of the latest registration is open."""
        return self._newest is not None

    def take_passed(self, replicas: Sequence[str]) -> bool:
        """Whether these were allocated through us; each allocation counts once."""
        with self._lock:
            known = self._passed.issuperset(replicas)
            self._passed.difference_update(replicas)
        return known

    def options(self) -> bytes:
        """The plugin's own. Raises ``grpc.RpcError``."""
        return self._call("GetDevicePluginOptions", b"", _PATIENCE_S)

    def stop(self) -> None:
        """The kubelet takes the end of its stream for the end of all devices."""
        self._server.stop(grace=None).wait()
        self._channel.close()
        if self.listening:
            self._socket.unlink(missing_ok=True)

    def _call(self, method: str, request: bytes, timeout_s: float | None = None) -> bytes:
        answer: bytes = self._channel.unary_unary(f"/{_SERVICE}/{method}")(
            request, timeout=timeout_s
        )
        return answer

    def _passing(self, method: str) -> Callable[[bytes, Any], bytes]:
        def call(request: bytes, context: Any) -> bytes:
            try:
                return self._call(method, request, _remaining_s(context))
            except grpc.RpcError as err:
                context.abort(_code(err), _details(err))
                raise  # abort has raised

        return call

    def _allocate(self, request: bytes, context: Any) -> bytes:
        answer = self._passing("Allocate")(request, context)
        try:
            replicas = allocated(request)
        except BadMessage:
            replicas = []  # the plugin has understood it
        with self._lock:
            self._passed.update(replicas)
        return answer

    def _prefer(self, request: bytes, context: Any) -> bytes:
        try:
            chosen = [self._choose(wish) for wish in wishes(request)]
        except BadMessage as err:
            _log.warning("preference_not_understood", reason=str(err))
            chosen = [None]
        except Refused as err:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(err))
        known = [each for each in chosen if each is not None]
        if len(known) < len(chosen):
            return self._passing("GetPreferredAllocation")(request, context)
        return preferred(known)

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        stream = self._channel.unary_stream(f"/{_SERVICE}/ListAndWatch")(request)
        if not context.add_callback(stream.cancel):
            stream.cancel()
        self._newest = stream
        try:
            yield from stream
        except grpc.RpcError as err:
            context.abort(_code(err), _details(err))
        finally:
            if self._newest is stream:
                self._newest = None


def register(folder: Path, endpoint: str, resource: str, options: bytes) -> None:
    """Tell the kubelet whom to ask from now on; anyone may, for anyone. Raises ``RpcError``."""
    with grpc.insecure_channel(f"unix:{folder / 'kubelet.sock'}") as channel:
        channel.unary_unary(_REGISTER)(
            registration(endpoint, resource, options), timeout=_PATIENCE_S
        )


def options_of(folder: Path, plugin: str) -> bytes:
    """What a plugin says of itself. Raises ``RpcError``."""
    with grpc.insecure_channel(f"unix:{folder / plugin}") as channel:
        answer: bytes = channel.unary_unary(f"/{_SERVICE}/GetDevicePluginOptions")(
            b"", timeout=_PATIENCE_S
        )
        return answer


def identity(socket: Path) -> tuple[int, int] | None:
    """Of a socket: it is another one when somebody listens anew."""
    try:
        found = socket.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _remaining_s(context: Any) -> float | None:
    """Until the caller gives up; None where it never does, which grpcio tells as centuries."""
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None or remaining_s > _NEVER_S else remaining_s


def _code(err: Any) -> Any:
    return err.code()


def _details(err: Any) -> str:
    details: str = err.details() or ""
    return details
