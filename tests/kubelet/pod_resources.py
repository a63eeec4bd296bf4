"""Reads the kubelet's PodResources API, which shows the replicas of each container."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tests.waiting import PATIENCE_S

podresources, podresources_services = grpc.protos_and_services("tests/kubelet/podresources.proto")


@dataclass(frozen=True, slots=True)
class Held:
    """The devices that a container holds, and its environment variables."""

    pod: str
    container: str
    replica: str

    @property
    def device(self) -> str:
        return self.replica.partition("::")[0]


def answer(socket: Path, call: str, request: Any) -> Any:
    """Return the kubelet's response. Retry when the kubelet's rate limit is exceeded, which is 100
    calls per second with a burst of 10.
    """
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        lister = podresources_services.PodResourcesListerStub(channel)
        while True:
            try:
                return getattr(lister, call)(request, timeout=PATIENCE_S)
            except grpc.RpcError as rejected:
                if rejected.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            time.sleep(0.05)
