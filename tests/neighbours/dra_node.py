"""A node with a real kubelet, our agent, and dra-example-driver as the DRA driver."""

import re
from typing import Any

import yaml

from tests.controlplane import ControlPlane, built
from tests.driver import Driver, Gpu
from tests.kubelet.node import Node
from tests.kubelet.runtime import Runtime

DRIVER = "gpu.nvidia.com"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


class DraRuntime(Runtime):
    """Sets the GPUs of the driver's CDI devices as an environment variable in a container."""

    #: Maps each device name in the ResourceSlice to the UUID of the GPU.
    uuids: dict[str, str]

    def _resolved(self, config: Any) -> list[str]:
        named = {each.name for each in config.CDI_devices}
        found: set[str] = set()
        for file in self.cdi.glob("*"):
            spec = yaml.safe_load(file.read_text())
            for device in spec["devices"]:
                if f"{spec['kind']}={device['name']}" in named:
                    for each in device["containerEdits"]["env"]:
                        if match := re.fullmatch(r"GPU_DEVICE_\d+=(.+)", each):
                            found.add(self.uuids[match[1]])
        return sorted(found)


class DraNode(Node):
    """A node whose ``start`` returns when the driver has published its devices.

    The driver has the name of NVIDIA's driver and offers GPUs of 80 GiB. If ``shared`` is true,
    pods can request parts of 1 GiB.
    """

    def __init__(self, plane: ControlPlane, name: str, gpus: int, shared: bool = True) -> None:
        super().__init__(plane, name, [], 1)
        self._count, self._shared = gpus, shared
        self.driver_binary = built("dra-example-driver")["dra-example-driver"]

    def _new_runtime(self, cdi: Any) -> DraRuntime:
        return DraRuntime(self.folder / "cri.sock", self.folder / "proc", self.driver, cdi)

    def start(self) -> None:
        (self.root / "plugins").mkdir(exist_ok=True)
        (self.root / "plugins_registry").mkdir(exist_ok=True)
        self.begin()
        self.until_ready()
        self._spawn_inside(
            "dra-example-driver",
            str(self.driver_binary),
            f"--kubeconfig={self.folder}/kubeconfig",
            f"--node-name={self.name}",
            f"--driver-name={DRIVER}",
            f"--num-devices={self._count}",
            *(["--gpu-allow-multiple-allocations"] if self._shared else []),
            "--cdi-root=/run/cdi",
        )
        self.wait(lambda: len(self.devices()) == self._count, "the driver's devices")
        self.runtime.uuids = self.devices()
        gpus = [Gpu(uuid) for uuid in self.devices().values()]
        self.driver = self.runtime.driver = Driver(self.driver.table, gpus)
        taints = {"spec": {"taints": None}}
        path = f"/api/v1/nodes/{self.name}"
        self.plane.call("PATCH", path, taints)

    def devices(self) -> dict[str, str]:
        """Return the UUID of each device that the driver has published."""
        return {
            device["name"]: device["attributes"]["uuid"]["string"]
            for each in self.plane.call("GET", SLICES)["items"]
            if each["spec"].get("nodeName") == self.name
            for device in each["spec"].get("devices", ())
        }

    def _show(self, process: str) -> None:
        if process in self._processes:  # The node has no device plugin.
            super()._show(process)
