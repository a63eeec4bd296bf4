"""Controls a real kubelet and plugin with the methods of the stand-in.

A relay between the kubelet and the plugin forwards and records every call. ``Real`` has the methods
of ``StandIn``. Each method returns when its operation is complete.
"""

import base64
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.kubelet.node import PLUGIN_HEARD, Node
from tests.kubelet.node_objects import RESOURCE, gpu_container, gpu_pod, plugin_configuration
from tests.kubelet.relay import Relay, api
from tests.standin.allocations import Allocated, Call, Container, Ids, Pod, Preferred, Verdict
from tests.standin.plugin import Plugin, Settings

PLUGIN = "nvidia-gpu.sock"
#: A part of the line that the kubelet logs when it receives pods from the API server.
PODS_SEEN = '"SyncLoop ADD" source="api"'


@dataclass(frozen=True, slots=True)
class Recorded:
    call: Call
    #: The plugin's preference. None if the call failed or the plugin was not called.
    answer: Ids | None = None


class Recorder(Relay):
    """Records the kubelet's calls of GetPreferredAllocation and Allocate in ``recorded``."""

    def __init__(self, node: Node) -> None:
        self.recorded: list[Recorded] = []
        super().__init__(node.root / "device-plugins", PLUGIN, RESOURCE, self._record)

    def _record(self, method: str, request: bytes, answer: bytes | None) -> None:
        if method == "Allocate" and answer is None:
            (asked,) = api.AllocateRequest.FromString(request).container_requests
            self.recorded.append(Recorded(Allocated(frozenset(asked.devices_ids))))
        if method == "GetPreferredAllocation":
            (asked,) = api.PreferredAllocationRequest.FromString(request).container_requests
            available, must = asked.available_deviceIDs, asked.must_include_deviceIDs
            call = Preferred(frozenset(available), frozenset(must), asked.allocation_size)
            assert len(call.available) == len(available)
            if answer is None:
                self.recorded.append(Recorded(call))
                return
            (given,) = api.PreferredAllocationResponse.FromString(answer).container_responses
            self.recorded[-1] = Recorded(call, frozenset(given.deviceIDs))


class Fed:
    """Makes the model repeat the choices of the real node. Fails if the model does not allow them.

    ``calls`` are the calls of the stand-in for this pod. Their number shows how far the pod has
    progressed.
    """

    def __init__(self, recorded: Sequence[Recorded], calls: Sequence[Call]) -> None:
        self._recorded = recorded
        self._calls = calls

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        asked = self._recorded[len(self._calls) - 1]
        assert call == asked.call
        # Raises ``PluginRefused`` if the model's plugin returns an error.
        options = plugin.options(call.available, call.must_include, call.size)
        assert asked.answer is not None, "the plugin returned an error"
        assert plugin.allows(asked.answer, call.available, call.must_include, call.size), options
        return asked.answer

    def some(self, replicas: Ids, count: int) -> Ids:
        rest = (each.call for each in self._recorded[len(self._calls) :])
        taken = next(call for call in rest if isinstance(call, Allocated)).replicas & replicas
        assert len(taken) == count, "the kubelet took another number of them"
        return taken


class Real:
    def __init__(self, node: Node) -> None:
        self.node = node
        self._pods: dict[str, Pod] = {}
        self._recorder = Recorder(node)
        self._interpose()

    def close(self) -> None:
        self._recorder.stop()

    def taken(self) -> list[Recorded]:
        """Return the calls that were recorded since the last call of this method."""
        recorded, self._recorder.recorded = self._recorder.recorded, []
        return recorded

    def admit(self, name: str, containers: Sequence[Container]) -> tuple[Pod, Verdict]:
        """Bind a pod and wait until the kubelet admits or rejects it."""
        self.node.bind(manifest(name, containers))
        pod = Pod(self.node.uid(name), tuple(containers), name)
        self._pods[pod.uid] = pod
        wanted = {(pod.uid, each.name) for each in containers if each.replicas}
        verdict: list[Verdict] = []

        def decided() -> bool:
            if wanted <= self.checkpoint()[0].keys():
                verdict.append(Verdict(True))
            elif refused := self._refusal(pod.uid):
                verdict.append(refused)
            return bool(verdict)

        self.node.wait(decided, f"a verdict on {name}")
        return pod, verdict[0]

    def _refusal(self, uid: str) -> Verdict | None:
        path = f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.uid={uid}"
        for event in self.node.plane.call("GET", path)["items"]:
            if event["reason"] in ("UnexpectedAdmissionError", "TopologyAffinityError"):
                return Verdict(False, event["reason"], event["message"])
        return None

    def runs(self, uid: str) -> None:
        """Wait until the containers of the pod run."""
        name = self._pods[uid].name
        self.node.wait(lambda: self.node.status(name)["phase"] == "Running", f"{name} runs")

    def end(self, uid: str) -> None:
        name = self._pods[uid].name
        self.runs(uid)
        for container in self.node.runtime.running(name).values():
            self.node.runtime.exit(container, 0)
        self.node.wait(lambda: self.node.status(name)["phase"] == "Succeeded", f"{name} ends")
        self.node.wait(lambda: not self.node.held(name), f"{name} frees its replicas")

    def delete(self, uid: str) -> None:
        name = self._pods[uid].name
        self.node.delete(name)
        self.node.wait(lambda: self.node.is_gone(name), f"{name} is gone")

    def force(self, uid: str) -> None:
        name = self._pods[uid].name
        self.node.delete(name, by_force=True)
        self.node.wait(lambda: not self.node.held(name), f"{name} frees its replicas")

    def fail(self, device: str) -> str:
        """Trigger an XID on the device. Return the replica that the plugin marks as unhealthy.

        Repeats the XID after half a minute, because a plugin that is just registering can miss the
        first XID. If it were repeated earlier, a busy machine could handle both XIDs and mark two
        replicas.
        """
        before = self.checkpoint()[1]
        again_s = 0.0

        def failed() -> bool:
            nonlocal again_s
            if time.monotonic() >= again_s:
                again_s = time.monotonic() + 30.0
                self.node.driver.fail(device, 79)
            return self.checkpoint()[1] != before

        self.node.wait(failed, f"{device} fails")
        (failed,) = before - self.checkpoint()[1]
        return failed

    def restart_kubelet(self, *, hold_plugin: bool) -> bool:
        """Restart the kubelet. Return whether the plugin registered before the kubelet received its
        pods.

        Returns when the plugin has registered and the kubelet has its pods. If ``hold_plugin`` is
        true, the plugin registers only after ``resume_plugin``.
        """
        if hold_plugin:
            self.node.pause("nvidia-device-plugin")
        self.node.kill("kubelet")
        self._recorder.stop()
        before = len(self.node.log("kubelet"))
        self.node.start_kubelet()

        def log() -> str:
            return self.node.log("kubelet")[before:]

        if self._pods:
            self.node.wait(lambda: PODS_SEEN in log(), "its pods")
        if hold_plugin:
            return False
        self.node.wait(lambda: PLUGIN_HEARD in log(), "its plugin")
        self._interpose_anew()
        return log().index(PLUGIN_HEARD) < log().find(PODS_SEEN)

    def resume_plugin(self) -> None:
        """Let the plugin register again after ``restart_kubelet``."""
        received = self._heard()
        self.node.resume("nvidia-device-plugin")
        self.node.wait(lambda: self._heard() > received, "the plugin is back")
        self._interpose_anew()

    def restart_plugin(self, settings: Settings) -> None:
        """Restart the plugin. The new process has received no XIDs, so every device is healthy."""
        self.node.kill("nvidia-device-plugin")
        self.node.wait(lambda: self.node.allocatable() == 0, "the kubelet misses the plugin")
        self.node.configure_plugin(configuration(settings))
        received = self._heard()
        self.node.start_plugin()
        self.node.wait(lambda: self._heard() > received, "the plugin is back")
        self._interpose()

    def checkpoint(self) -> tuple[dict[tuple[str, str], Any], Ids]:
        """Return the allocations in the checkpoint by pod and container, and the healthy
        replicas.
        """
        path = self.node.root / "device-plugins/kubelet_internal_checkpoint"
        return decoded(path.read_bytes())

    def _heard(self) -> int:
        """Return how often the kubelet has received the plugin's replicas."""
        return self.node.log("kubelet").count(PLUGIN_HEARD)

    def _interpose_anew(self) -> None:
        """Start the relay again, because the new kubelet has removed the relay's socket."""
        recorded = self._recorder.recorded
        self._recorder = Recorder(self.node)
        self._recorder.recorded = recorded
        self._interpose()

    def _interpose(self) -> None:
        """Start the relay after the plugin is ready. Otherwise, a late list of replicas could undo
        later changes.
        """
        received = self._heard()
        self._recorder.register()
        self.node.wait(lambda: self._heard() > received, "the kubelet's interest in the relay")


def decoded(content: bytes) -> tuple[dict[tuple[str, str], Any], Ids]:
    """Decode a checkpoint file. Ignore the order of its lists."""
    data = json.loads(content)["Data"]
    given = {
        (each["PodUID"], each["ContainerName"]): (
            each["ResourceName"],
            {numa: frozenset(ids) for numa, ids in each["DeviceIDs"].items()},
            environment(each["AllocResp"]),
        )
        for each in data["PodDeviceEntries"] or ()
    }
    return given, frozenset(data["RegisteredDevices"].get(RESOURCE, ()))


def environment(answer: str) -> dict[str, Ids]:
    """Return the environment in an AllocResp, with devices as sets, because the plugin returns
    devices in any order.
    """
    envs = api.ContainerAllocateResponse.FromString(base64.b64decode(answer)).envs
    return {key: frozenset(value.split(",")) for key, value in envs.items()}


def configuration(settings: Settings) -> dict[str, Any]:
    """Return the configuration of the plugin."""
    whole = plugin_configuration(settings.replicas)
    if settings.fail_requests_greater_than_one:
        whole["sharing"]["timeSlicing"]["failRequestsGreaterThanOne"] = True
    return whole


def manifest(name: str, containers: Sequence[Container]) -> dict[str, Any]:
    def of(each: Container) -> dict[str, Any]:
        command = ("exit", "0") if each.init and not each.sidecar else ()
        whole = gpu_container(each.name, *command, gpus=each.replicas)
        return whole | ({"restartPolicy": "Always"} if each.sidecar else {})

    return gpu_pod(
        name,
        initContainers=[of(each) for each in containers if each.init],
        containers=[of(each) for each in containers if not each.init],
    )
