"""Checks that the agent's view of sharing equals the real plugin's replicas and the real labels."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.probes.node_probe import of_labels
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.readings import DeviceReading, PluginReading, RegisteredReading
from agent.sharing import Share, SharingReadings, shares
from headroom.contract.gpunode import Replicas, Sharing
from tests.driver import GIB, Gpu
from tests.nvidia.conftest import RESOURCE, Kubelet, sharing

ONE_MODEL = [Gpu(f"GPU-{index}", 80 * GIB) for index in range(3)]
TWO_MODELS = [*ONE_MODEL, Gpu("GPU-3", 24 * GIB, model="NVIDIA L4")]
SHARED = f"{RESOURCE}.shared"


@pytest.mark.parametrize("gpus", [ONE_MODEL, TWO_MODELS], ids=["one model", "two models"])
@pytest.mark.parametrize(
    ("config", "kind", "resource", "replicas"),
    [
        pytest.param({}, "none", RESOURCE, 1, id="not shared"),
        pytest.param(sharing("timeSlicing", 4), "time-slicing", RESOURCE, 4, id="time-slicing"),
        pytest.param(
            sharing("timeSlicing", 2, renameByDefault=True, failRequestsGreaterThanOne=True),
            *("time-slicing", SHARED, 2),
            id="time-slicing, renamed",
        ),
    ],
)
def test_sharing_is_reported_as_the_plugin_advertises_it(
    start_plugin: Callable[..., Kubelet],
    tmp_path: Path,
    gpus: list[Gpu],
    config: dict[str, Any],
    kind: Sharing,
    resource: str,
    replicas: int,
) -> None:
    kubelet = start_plugin(gpus, config)
    advertised = kubelet.advertised()
    # The probe must find only the process of this plugin and no other process of this machine.
    pid = kubelet._processes["nvidia-device-plugin"].pid
    (tmp_path / str(pid)).symlink_to(f"/proc/{pid}")
    probe = ConfigurationProbe(tmp_path, kubelet.plugins)
    (configured,) = [r for r in probe.read() if isinstance(r, PluginReading)]
    registered = RegisteredReading(
        "podresources", advertised.resource, frozenset(advertised.replicas)
    )
    devices = [DeviceReading("nvml", gpu.uuid, index) for index, gpu in enumerate(gpus)]
    found, complaints = shares(
        devices, SharingReadings(registered=[registered], plugins=[configured]), {}
    )
    assert complaints == []
    each = Counter(replica.partition("::")[0] for replica in advertised.replicas)
    assert found == {
        gpu.uuid: Share(kind, advertised.resource, Replicas(free=each[gpu.uuid])) for gpu in gpus
    }
    assert (advertised.resource, set(each.values())) == (resource, {replicas})
    shown = {} if kind == "none" else {resource: replicas}
    assert (configured.sharing, configured.replicas) == (kind, shown)
    assert configured.fail_requests_greater_than_one is (resource == SHARED)


@pytest.mark.parametrize("gpus", [ONE_MODEL, TWO_MODELS], ids=["one model", "two models"])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({}, PluginReading("labels", "none", {}), id="not shared"),
        pytest.param(
            sharing("timeSlicing", 4),
            PluginReading("labels", "time-slicing", {RESOURCE: 4}),
            id="time-slicing",
        ),
        pytest.param(
            sharing("timeSlicing", 2, renameByDefault=True),
            PluginReading("labels", "time-slicing", {SHARED: 2}),
            id="time-slicing, renamed",
        ),
        pytest.param(sharing("mps", 5), PluginReading("labels", "mps", {RESOURCE: 5}), id="mps"),
    ],
)
def test_labels_of_the_real_feature_discovery_agree_with_the_plugin(
    discover: Callable[..., dict[str, str]],
    gpus: list[Gpu],
    config: dict[str, Any],
    expected: PluginReading,
) -> None:
    assert of_labels(discover(gpus, config)) == expected
