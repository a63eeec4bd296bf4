"""Runs NVIDIA's real device plugin and GPU feature discovery on a simulated driver.

Both programs read the same configuration file, so both use the configuration that ``sharing``
returns.
"""

import contextlib
import os
import queue
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from tests.controlplane import built
from tests.driver import Driver, Gpu, library_folder, mig_minors
from tests.kubelet.node_objects import INSIDE, write_mounts
from tests.kubelet.relay import api, api_services
from tests.processes import Processes, starts_processes
from tests.waiting import PATIENCE_S

RESOURCE = "nvidia.com/gpu"
TIMEOUT_S = PATIENCE_S


def sharing(strategy: str, replicas: int, **more: Any) -> dict[str, Any]:
    """Return the configuration of a node with shared GPUs. ``strategy`` is a key of the
    configuration file.
    """
    resource = {"name": RESOURCE, "replicas": replicas}
    return {"sharing": {strategy: {"resources": [resource], **more}}}


@dataclass(frozen=True, slots=True)
class Advertised:
    """The registration and the first ListAndWatch message that a plugin sends to the kubelet."""

    resource: str
    socket: str
    #: Maps each replica to Healthy or Unhealthy.
    replicas: Mapping[str, str]


class Kubelet(Processes, api_services.RegistrationServicer):  # type: ignore[misc]
    """Runs a plugin together with the part of a kubelet with which the plugin registers.

    The plugin runs in its own mount namespace, because its paths are fixed.
    """

    def __init__(self) -> None:
        super().__init__("headroom-plugin-")
        self.plugins = self.folder / "kubelet/device-plugins"
        self.plugins.mkdir(parents=True)
        (self.folder / "cdi").mkdir()
        self._registrations: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        api_services.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.plugins / 'kubelet.sock'}")
        self._server.start()

    def Register(self, request: Any, context: Any) -> Any:
        self._registrations.put(request)
        return api.Empty()

    def start(self, gpus: list[Gpu], config: Mapping[str, Any]) -> None:
        self._cover(gpus)
        (self.folder / "plugin.yaml").write_text(yaml.safe_dump({"version": "v1", **config}))
        name = "nvidia-device-plugin"
        self.spawn(
            name,
            *("unshare", "--mount", "sh", "-c", INSIDE, "sh", str(self.folder)),
            str(built(name)[name]),
            f"--config-file={self.folder}/plugin.yaml",
            "--device-discovery-strategy=nvml",
            env=driver_environment(self.folder, gpus)
            | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "MPS_ROOT": "/run/nvidia/mps"},
        )

    def _cover(self, gpus: list[Gpu]) -> None:
        """Create the files that the plugin needs in addition to the driver library."""
        minors = self.folder / "over/proc/driver/nvidia-caps/mig-minors"
        minors.parent.mkdir(parents=True)
        minors.write_text(mig_minors(gpus))
        write_mounts(self.folder, ["/proc/driver"])
        # Create a fake MPS control daemon that accepts every command.
        control = self.folder / "bin/nvidia-cuda-mps-control"
        control.parent.mkdir()
        control.write_text("#!/bin/sh\ncat > /dev/null\necho 100.0\n")
        control.chmod(0o755)

    def allocate(self, registered: Any, *replicas: str) -> Any:
        """Return the plugin's response for a container with these replicas."""
        asked = {"container_requests": [{"devices_ids": list(replicas)}]}
        with grpc.insecure_channel(f"unix:{self.plugins / registered.endpoint}") as channel:
            plugin = api_services.DevicePluginStub(channel)
            answer = plugin.Allocate(api.AllocateRequest(**asked), timeout=TIMEOUT_S)
        (container,) = answer.container_responses
        return container

    def advertised(self, registered: Any = None) -> Advertised:
        """Return the replicas that the plugin advertises after this registration, or after the next
        registration.
        """
        registered = registered or self.registered()
        with grpc.insecure_channel(f"unix:{self.plugins / registered.endpoint}") as channel:
            plugin = api_services.DevicePluginStub(channel)
            first = next(plugin.ListAndWatch(api.Empty(), timeout=TIMEOUT_S))
        return Advertised(
            registered.resource_name,
            registered.endpoint,
            {device.ID: device.health for device in first.devices},
        )

    def registered(self) -> Any:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.raise_if_ended()
            with contextlib.suppress(queue.Empty):
                return self._registrations.get(timeout=0.1)
        raise TimeoutError(f"no plugin registered\n{self.logs()}")

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
        super().stop()


def driver_environment(folder: Path, gpus: list[Gpu]) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": str(library_folder()),
        "FAKE_NVML_TABLE": str(Driver(folder / "devices", gpus).table),
    }


@pytest.fixture(scope="session")
@starts_processes
def binaries(request: pytest.FixtureRequest) -> dict[str, Path]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # Show the progress of the build, because the first build takes minutes.
    with capture.global_and_fixture_disabled():
        return built("gpu-feature-discovery", "nvidia-device-plugin")


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the plugin's paths are fixed: it needs root, in a mount namespace of its own")


@pytest.fixture
def start_plugin(root: None, binaries: dict[str, Path]) -> Iterator[Callable[..., Kubelet]]:
    """Return a function that runs a plugin on given GPUs and with a given configuration, with its
    own kubelet.
    """
    with ExitStack() as stack:

        def start(gpus: list[Gpu], config: Mapping[str, Any]) -> Kubelet:
            kubelet = Kubelet()
            stack.callback(kubelet.stop)
            kubelet.start(gpus, config)
            return kubelet

        yield start


@pytest.fixture
def discover(binaries: dict[str, Path], tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return a function that runs GPU feature discovery once and returns the labels that it sets.

    ``statements`` are lines that follow the last GPU in the driver's table.
    """

    def run(gpus: list[Gpu], config: Mapping[str, Any], *statements: str) -> dict[str, str]:
        (tmp_path / "gfd.yaml").write_text(yaml.safe_dump({"version": "v1", **config}))
        environment = os.environ | driver_environment(tmp_path, gpus)
        with (tmp_path / "devices").open("a") as table:
            table.writelines(f"{statement}\n" for statement in statements)
        done = subprocess.run(
            [
                binaries["gpu-feature-discovery"],
                "--oneshot",
                "--use-node-feature-api=false",
                "--device-discovery-strategy=nvml",
                f"--config-file={tmp_path / 'gfd.yaml'}",
                f"--output-file={tmp_path / 'labels'}",
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "labels").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    return run
