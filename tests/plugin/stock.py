"""NVIDIA's device plugin, the real one, asked as the kubelet asks it; on a driver that is not."""

import time
from collections.abc import Sequence

import grpc
import yaml

from tests.controlplane import built
from tests.driver import Driver, Gpu, library_folder
from tests.kubelet.node import INSIDE, plugin_configuration
from tests.processes import Processes

api, _ = grpc.protos_and_services("tests/kubelet/deviceplugin.proto")

METHOD = "/v1beta1.DevicePlugin/GetPreferredAllocation"
START_S = 60.0


class StockPlugin(Processes):
    """It knows ``gpus`` devices, GPU-0 and so on, of ``replicas`` each, and no kubelet."""

    def __init__(self, gpus: int, replicas: int) -> None:
        super().__init__("headroom-plugin-")
        driver = Driver(self.folder / "devices", [Gpu(f"GPU-{index}") for index in range(gpus)])
        (self.folder / "kubelet/device-plugins").mkdir(parents=True)
        (self.folder / "covered").write_text("")
        (self.folder / "plugin.yaml").write_text(yaml.safe_dump(plugin_configuration(replicas)))
        self.spawn(
            "nvidia-device-plugin",
            *("unshare", "--mount", "sh", "-c", INSIDE, "sh", str(self.folder)),
            str(built("nvidia-device-plugin")["nvidia-device-plugin"]),
            f"--config-file={self.folder}/plugin.yaml",
            "--device-discovery-strategy=nvml",
            "--kubelet-socket=",
            env={
                "LD_LIBRARY_PATH": str(library_folder()),
                "FAKE_NVML_TABLE": str(driver.table),
            },
        )
        socket = self.folder / "kubelet/device-plugins/nvidia-gpu.sock"
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._prefer = self._channel.unary_unary(
            METHOD,
            request_serializer=api.PreferredAllocationRequest.SerializeToString,
            response_deserializer=api.PreferredAllocationResponse.FromString,
        )
        deadline_s = time.monotonic() + START_S
        while not socket.exists():
            self.raise_if_ended()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the plugin never served:\n{self.logs()}")
            time.sleep(0.02)

    def stop(self) -> None:
        self._channel.close()
        super().stop()

    def prefer(
        self, available: Sequence[str], required: Sequence[str], size: int, times: int = 1
    ) -> list[list[str]]:
        """What it answers to the same question, asked so many times in one call."""
        question = {
            "available_deviceIDs": available,
            "must_include_deviceIDs": required,
            "allocation_size": size,
        }
        answer = self._prefer(
            api.PreferredAllocationRequest(container_requests=[question] * times), timeout=30.0
        )
        return [list(each.deviceIDs) for each in answer.container_responses]
