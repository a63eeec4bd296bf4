"""Runs a device plugin that forwards the kubelet's calls to the real plugin, and registers device
plugins.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from tests.waiting import PATIENCE_S

api, api_services = grpc.protos_and_services("tests/kubelet/deviceplugin.proto")

SERVICE = "v1beta1.DevicePlugin"


class Relay:
    """Forwards calls to the plugin. It listens as soon as it is created. The kubelet calls it after
    ``register``.

    ``seen`` gets the method, the request, and the response, which is None before the plugin has
    answered.
    """

    def __init__(
        self,
        folder: Path,
        plugin: str,
        resource: str,
        seen: Callable[[str, bytes, bytes | None], None],
    ) -> None:
        self.folder, self.resource, self._seen = folder, resource, seen
        self._channel = grpc.insecure_channel(f"unix:{folder / plugin}")
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        handlers = {"ListAndWatch": grpc.unary_stream_rpc_method_handler(self._watch)} | {
            method: grpc.unary_unary_rpc_method_handler(self._pass(method))
            for method in (
                *("GetDevicePluginOptions", "GetPreferredAllocation"),
                *("Allocate", "PreStartContainer"),
            )
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        self._server.add_insecure_port(f"unix:{folder / 'relay.sock'}")
        self._server.start()

    def register(self) -> None:
        register(self.folder, "relay.sock", self.resource)

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
        self._channel.close()

    def _watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        stream = self._channel.unary_stream(f"/{SERVICE}/ListAndWatch")(request)
        context.add_callback(stream.cancel)
        yield from stream

    def _pass(self, method: str) -> Callable[[bytes, Any], bytes]:
        def call(request: bytes, context: Any) -> bytes:
            self._seen(method, request, None)
            try:
                answer: bytes = self._channel.unary_unary(f"/{SERVICE}/{method}")(
                    request, timeout=PATIENCE_S
                )
            except grpc.RpcError as refused:
                context.abort(refused.code(), refused.details())
            self._seen(method, request, answer)
            return answer

        return call


def register(folder: Path, endpoint: str, resource: str) -> None:
    """Register an endpoint for a resource with the kubelet. The kubelet accepts this from any
    process.
    """
    with grpc.insecure_channel(f"unix:{folder / 'kubelet.sock'}") as channel:
        api_services.RegistrationStub(channel).Register(
            api.RegisterRequest(
                version="v1beta1",
                endpoint=endpoint,
                resource_name=resource,
                options={"get_preferred_allocation_available": True},
            ),
            timeout=PATIENCE_S,
        )
