"""Tests how the agent determines the sharing of devices from the plugin, the kubelet, flags and
labels.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from agent.probes.node_probe import of_labels
from agent.probes.readings import (
    AnswerReading,
    DeviceReading,
    HoldingReading,
    PluginReading,
    RegisteredReading,
    SharingReading,
    TopologyReading,
)
from agent.sharing import Share, SharingReadings, plugin, shares
from headroom.contract.gpunode import Device, Replicas

GPU = "nvidia.com/gpu"
SHARED = f"{GPU}.shared"
DEVICES = [DeviceReading("nvml", "A", 0), DeviceReading("nvml", "B", 1)]


def registered(resource: str, *ids: str) -> RegisteredReading:
    return RegisteredReading("podresources", resource, frozenset(ids))


def replicas(count: int, *devices: str) -> list[str]:
    return [f"{device}::{number}" for device in devices for number in range(count)]


def held(*ids: str, resource: str = GPU) -> list[HoldingReading]:
    return [HoldingReading("checkpoint", "u", "main", resource, each) for each in ids]


def configured(source: str = "plugin", **changes: Any) -> PluginReading:
    return PluginReading(source, **{"sharing": "time-slicing", **changes})


def counts(
    shown: SharingReadings, before: Mapping[str, Device] | None = None
) -> dict[str, tuple[int, ...]]:
    found, _ = shares(DEVICES, shown, before or {})
    return {
        uuid: (share.replicas.free, share.replicas.allocated, share.replicas.unhealthy)
        for uuid, share in found.items()
    }


def why(shown: SharingReadings) -> list[str]:
    return sorted({complaint.what for complaint in shares(DEVICES, shown, {})[1]})


def test_replicas_are_free_allocated_or_unhealthy() -> None:
    ids = replicas(4, "A", "B")
    ids.remove("A::2")
    shown = SharingReadings(
        registered=[registered(GPU, *ids)],
        holdings=held("A::0", "B::1", "B::3"),
        plugins=[configured()],
    )
    assert counts(shown) == {"A": (2, 1, 1), "B": (2, 2, 0)}
    assert why(shown) == []


def test_an_allocated_unhealthy_replica_does_not_become_free_again() -> None:
    shown = SharingReadings(
        registered=[registered(GPU, "A::0", "B::0", "B::1")], holdings=held("A::1")
    )
    assert counts(shown)["A"] == (1, 0, 1)


def test_an_init_container_and_the_next_container_use_one_replica() -> None:
    twice = [*held("A::0"), HoldingReading("checkpoint", "u", "first", GPU, "A::0")]
    shown = SharingReadings(registered=[registered(GPU, *replicas(2, "A"))], holdings=twice)
    assert counts(shown)["A"] == (1, 1, 0)


def test_the_plugin_s_configuration_includes_a_last_unhealthy_replica() -> None:
    shown = SharingReadings(
        registered=[registered(GPU, *replicas(3, "A"))],
        plugins=[configured(replicas={GPU: 4})],
    )
    assert counts(shown)["A"] == (3, 0, 1)


def test_after_a_reduction_only_advertised_replicas_count_and_the_rest_is_reported() -> None:
    shown = SharingReadings(
        registered=[registered(GPU, *replicas(2, "A", "B"))],
        holdings=held("A::0", "A::3"),
        plugins=[configured(replicas={GPU: 2})],
    )
    assert counts(shown) == {"A": (1, 1, 0), "B": (2, 0, 0)}
    assert why(shown) == [f"a pod holds {GPU} that the plugin no longer advertises"]


def test_after_a_renaming_the_new_resource_name_counts() -> None:
    shown = SharingReadings(
        registered=[registered(GPU), registered(SHARED, *replicas(2, "A", "B"))],
        holdings=held("A::0"),
        plugins=[configured()],
    )
    found, _ = shares(DEVICES, shown, {})
    assert found["A"] == Share("time-slicing", SHARED, Replicas(free=2))
    assert why(shown) == [f"a pod holds {GPU} that the plugin no longer advertises"]


def test_after_a_change_to_sharing_earlier_holdings_do_not_count() -> None:
    shown = SharingReadings(
        registered=[registered(GPU, *replicas(2, "A", "B"))],
        holdings=held("A"),
        plugins=[configured()],
    )
    assert counts(shown)["A"] == (2, 0, 0)
    assert why(shown) == [f"a pod holds {GPU} that the plugin no longer advertises"]


def test_while_the_plugin_is_away_no_replica_is_free() -> None:
    shared = Device(uuid="A", sharing="mps", resource=GPU, replicas=Replicas(free=3, allocated=1))
    shown = SharingReadings(registered=[registered(GPU)], holdings=held("A::0"))
    found, _ = shares(DEVICES, shown, {"A": shared})
    assert found == {"A": Share("mps", GPU, Replicas(unhealthy=4))}


def test_an_unhealthy_unshared_device_still_belongs_to_the_plugin() -> None:
    known = {"A": Device(uuid="A", resource=GPU, replicas=Replicas(free=1))}
    shown = SharingReadings(registered=[registered(GPU, "B")])
    assert counts(shown, known) == {"A": (0, 0, 1), "B": (1, 0, 0)}
    assert counts(shown) == {"B": (1, 0, 0)}  # A device that was never observed is not invented.


def test_mig_devices_have_the_resource_of_their_profile() -> None:
    mig = [
        DeviceReading("nvml", f"MIG-{n}", 0, kind="mig", parent="P", gpu_instance=n)
        for n in range(2)
    ]
    shown = SharingReadings(
        registered=[
            registered("nvidia.com/mig-1g.10gb", "MIG-0"),
            registered("nvidia.com/mig-2g.20gb", "MIG-1::0", "MIG-1::1"),
        ],
        holdings=held("MIG-1::0", resource="nvidia.com/mig-2g.20gb"),
        plugins=[configured()],
    )
    found, _ = shares(mig, shown, {})
    assert found["MIG-0"] == Share("none", "nvidia.com/mig-1g.10gb", Replicas(free=1))
    assert found["MIG-1"] == Share(
        "time-slicing", "nvidia.com/mig-2g.20gb", Replicas(free=1, allocated=1)
    )


def test_flags_override_the_plugin_and_holdings_still_come_from_the_kubelet() -> None:
    shown = SharingReadings(
        flags=SharingReading("flags", GPU, 4, "mps"),
        registered=[registered(GPU, *replicas(2, "A", "B"))],
        holdings=held("A::0"),
        plugins=[configured()],
    )
    assert counts(shown) == {"A": (3, 1, 0), "B": (4, 0, 0)}
    assert plugin(shown).source.split(",")[0] == "flags"


def test_devices_that_the_driver_does_not_list_are_reported() -> None:
    shown = SharingReadings(registered=[registered(GPU, "A")], holdings=held("C", resource=GPU))
    assert why(shown) == [f"a pod holds {GPU} of a device that the driver does not list"]
    shown = SharingReadings(
        registered=[registered(GPU, *replicas(2, "A", "C")), registered("amd.com/gpu", "C")],
        plugins=[configured()],
    )
    _, (complaint,) = shares(DEVICES, shown, {})
    assert complaint.what == (f"the plugin advertises {GPU} of a GPU that the driver does not list")
    # The sources for the devices of pods are available.
    assert complaint.source == "nvml"
    other = SharingReadings(
        registered=[registered(GPU, "A")], holdings=held("nic", resource="other/nic")
    )
    assert why(other) == []


ANSWERED = [AnswerReading("checkpoint", GPU, frozenset({"envvar"}), mps=True)]
LABELS = {
    "nvidia.com/gpu.sharing-strategy": "mps",
    "nvidia.com/gpu.replicas": "2",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED",
}


@pytest.mark.parametrize(
    ("plugins", "answers", "expected"),
    [
        pytest.param([configured()], ANSWERED, "time-slicing", id="the configuration"),
        pytest.param(
            [configured(sharing="none")], ANSWERED, "mps", id="the configuration is not in use"
        ),
        pytest.param([], ANSWERED, "mps", id="the plugin's answers"),
        pytest.param([of_labels(LABELS)], [], "mps", id="the labels"),
        pytest.param([], [], "time-slicing", id="no source: reported, and treated as time-slicing"),
    ],
)
def test_sharing_is_taken_from_the_best_source(
    plugins: list[PluginReading], answers: list[AnswerReading], expected: str
) -> None:
    shown = SharingReadings(
        registered=[registered(GPU, *replicas(2, "A"))], plugins=plugins, answers=answers
    )
    found, _ = shares(DEVICES, shown, {})
    assert found["A"].sharing == expected
    assert bool(why(shown)) == (not plugins and not answers)


def test_labels_that_contradict_the_plugin_are_reported() -> None:
    labels = of_labels(LABELS)
    assert labels is not None
    shown = SharingReadings(plugins=[labels, configured()])
    assert why(shown) == ["sharing differs from the plugin's configuration"]


def test_each_part_of_the_configuration_comes_from_its_best_source() -> None:
    found = plugin(
        SharingReadings(
            plugins=[
                configured("labels", fail_requests_greater_than_one=True),
                configured("plugin", allocation_policy="packed", toolkit_ignores_environment=True),
            ],
            answers=ANSWERED,
            topologies=[
                TopologyReading("kubelet", "none"),
                TopologyReading("configz", "restricted"),
            ],
        )
    )
    assert found.allocation_policy == "packed"
    assert found.device_list_strategy == "envvar"
    assert found.fail_requests_greater_than_one is True
    assert found.topology_manager_policy == "restricted"
    assert found.ignores_visible_devices
    assert found.source == "plugin,checkpoint,labels,configz"


def test_responses_from_two_configurations_give_no_policy() -> None:
    two = [*ANSWERED, AnswerReading("checkpoint", GPU, frozenset({"cdi-cri"}), mps=False)]
    assert plugin(SharingReadings(answers=two)).device_list_strategy == ""
    assert not plugin(SharingReadings()).ignores_visible_devices


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param(LABELS, PluginReading("labels", "mps", {GPU: 2}), id="not renamed"),
        pytest.param(
            LABELS | {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            PluginReading("labels", "mps", {SHARED: 2}),
            id="renamed",
        ),
        pytest.param(
            {
                "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
                "cloud.google.com/gke-max-shared-clients-per-gpu": "3",
            },
            PluginReading("labels", "time-slicing", {GPU: 3}, fail_requests_greater_than_one=True),
            id="GKE",
        ),
        pytest.param(
            {"nvidia.com/gpu.sharing-strategy": "none", "nvidia.com/gpu.replicas": "1"},
            PluginReading("labels", "none", {}),
            id="not shared",
        ),
        pytest.param(
            LABELS | {"nvidia.com/gpu.replicas": "many"},
            PluginReading("labels", "mps", {}),
            id="not a number",
        ),
        pytest.param({"nvidia.com/gpu.sharing-strategy": ""}, None, id="invalid in GFD"),
        pytest.param({}, None, id="none"),
    ],
)
def test_labels_of_gfd_and_gke_are_read(
    labels: dict[str, str], expected: PluginReading | None
) -> None:
    assert of_labels(labels) == expected
