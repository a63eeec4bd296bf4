"""Tests that the replica IDs of every plugin are mapped to their devices."""

import pytest
from msgspec.structs import replace

from agent.probes.readings import DeviceReading
from agent.probes.replica_ids import parse, resolve

GPU = "GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76"
OTHER = "GPU-00000000-483b-b48f-d7e5-75fb19a52b76"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


def gpu(uuid: str, index: int) -> DeviceReading:
    return DeviceReading("nvml", uuid, index)


def mig(uuid: str, instance: int, parent: str = OTHER, index: int = 1) -> DeviceReading:
    return DeviceReading("nvml", uuid, index, kind="mig", parent=parent, gpu_instance=instance)


NODE = [gpu(GPU, 0), mig(MIG, 3), mig("MIG-b", 5), mig("MIG-c", 5)]


@pytest.mark.parametrize(
    ("replica", "device", "number"),
    [
        pytest.param(GPU, GPU, None, id="a whole GPU"),
        pytest.param(f"{GPU}::11", GPU, 11, id="a share of one"),
        pytest.param(MIG, MIG, None, id="a MIG device"),
        pytest.param(f"{MIG}::0", MIG, 0, id="a share of one MIG device"),
        pytest.param(f"MIG-{OTHER}/3/0", MIG, None, id="a MIG device of an old driver"),
        pytest.param(f"MIG-{OTHER}/3/0::2", MIG, 2, id="a share of a MIG device of an old driver"),
        pytest.param("nvidia0", GPU, None, id="GKE: a whole GPU"),
        pytest.param("nvidia0/vgpu3", GPU, 3, id="GKE: a share"),
        pytest.param("nvidia1/gi3", MIG, None, id="GKE: a MIG device"),
        pytest.param("nvidia1/gi3/vgpu2", MIG, 2, id="GKE: a share of a MIG device"),
        pytest.param("MIG-b", "MIG-b", None, id="one of two compute instances, by its uuid"),
    ],
)
def test_a_replica_id_is_mapped_to_its_device(
    replica: str, device: str, number: int | None
) -> None:
    assert resolve([replica], NODE) == {replica: device}
    assert parse(replica).number == number


@pytest.mark.parametrize(
    "replica",
    [
        pytest.param("GPU-gone::1", id="unknown device"),
        pytest.param("nvidia1", id="GKE: a GPU that is cut into MIG devices"),
        pytest.param("nvidia7/vgpu0", id="GKE: unknown number"),
        pytest.param(f"MIG-{OTHER}/5/1", id="one of two compute instances, by its place"),
        pytest.param("all", id="WSL's name with several GPUs"),
        pytest.param("tegra", id="Jetson's name with several GPUs"),
        pytest.param("", id="empty"),
        pytest.param("::1", id="a number without a device"),
        pytest.param("mlx5_0", id="of another plugin"),
    ],
)
def test_a_replica_id_of_no_or_several_devices_is_skipped(replica: str) -> None:
    assert resolve([replica], NODE) == {}


def test_gke_names_a_device_by_its_minor_number_if_the_driver_reports_it() -> None:
    """The minor numbers differ from the indices if a device is hidden, or if the bus has another
    order.
    """
    node = [replace(gpu(GPU, 0), minor=1), replace(gpu("GPU-b", 1), minor=0)]
    cut = replace(mig(MIG, 3, parent="GPU-c", index=2), minor=7)
    found = resolve(["nvidia1/vgpu0", "nvidia0", "nvidia7/gi3"], [*node, cut])
    assert found == {"nvidia1/vgpu0": GPU, "nvidia0": "GPU-b", "nvidia7/gi3": MIG}


@pytest.mark.parametrize("name", ["all", "all::3", "tegra", "tegra::3"])
def test_the_only_device_has_its_own_name_on_wsl_and_on_jetson(name: str) -> None:
    assert resolve([name], [gpu(GPU, 0)]) == {name: GPU}
