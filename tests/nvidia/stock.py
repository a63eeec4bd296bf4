"""Calls NVIDIA's real device plugin as the kubelet does to choose replicas."""

from collections.abc import Sequence

import grpc

from tests.driver import Gpu
from tests.kubelet.relay import api, api_services
from tests.nvidia.conftest import Kubelet, sharing
from tests.waiting import PATIENCE_S


class StockPlugin:
    """A plugin with ``gpus`` devices (GPU-0, GPU-1 and so on) that have ``replicas``
    replicas each.
    """

    def __init__(self, gpus: int, replicas: int) -> None:
        self._kubelet = Kubelet()
        try:
            devices = [Gpu(f"GPU-{index}") for index in range(gpus)]
            self._kubelet.start(devices, sharing("timeSlicing", replicas) if replicas > 1 else {})
            socket = self._kubelet.plugins / self._kubelet.advertised().socket
            self._channel = grpc.insecure_channel(f"unix:{socket}")
        except BaseException:
            self._kubelet.stop()
            raise
        self._plugin = api_services.DevicePluginStub(self._channel)

    def stop(self) -> None:
        self._channel.close()
        self._kubelet.stop()

    def prefer(
        self, available: Sequence[str], required: Sequence[str], size: int, times: int = 1
    ) -> list[list[str]]:
        """Return ``times`` answers to the same request, with a single call."""
        question = {
            "available_deviceIDs": available,
            "must_include_deviceIDs": required,
            "allocation_size": size,
        }
        request = api.PreferredAllocationRequest(container_requests=[question] * times)
        answer = self._plugin.GetPreferredAllocation(request, timeout=PATIENCE_S)
        return [list(each.deviceIDs) for each in answer.container_responses]
