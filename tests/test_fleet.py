"""Checks that a valid fleet file is read, and that an invalid file is rejected with the position,
the error and an example.
"""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from headroom.errors import BadSettings
from headroom.runtime.settings.fleet_file import load_fleet


def load(folder: Path, text: str) -> object:
    path = folder / "fleet.yaml"
    path.write_text(text, encoding="utf-8")
    return load_fleet(path)


def test_a_fleet_entry_creates_its_nodes_and_devices(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "nodes: [{name: a, count: 2, gpus: 3, memory: 24Gi, reserved: 512Mi, "
        "sharing: time-slicing, replicas: 4, model: L4}]"
    )
    fleet = load_fleet(tmp_path / "f.yaml")
    nodes = list(fleet.gpunodes(datetime(2026, 1, 1, tzinfo=UTC)))
    assert [node.name for node in nodes] == ["a-0000", "a-0001"]
    status = nodes[1].status
    assert status is not None
    summary = status.summary
    assert (summary.devices, summary.memory, summary.sharing) == (3, "72.0 GiB", "time-slicing")
    assert (summary.used, summary.free) == ("0.0 GiB", "70.5 GiB")
    assert [device.uuid for device in status.devices] == [f"GPU-a-0001-{i}" for i in range(3)]
    assert status.devices[0].memory_bytes == 24 << 30
    assert status.devices[0].reserved_bytes == 512 << 20
    assert status.devices[0].replicas.free == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "nodes: Field required", id="empty"),
        pytest.param("- a", "must contain a mapping", id="a list"),
        pytest.param("nodes: [", "is not YAML", id="not YAML"),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 1Gi, replica: 4}]",
            "nodes.0.replica: is not a field; did you mean replicas?",
            id="misspelled field",
        ),
        pytest.param("node: [{}]", "node: is not a field; did you mean nodes?", id="no s"),
        pytest.param("nodes: []", "nodes: ", id="no nodes"),
        pytest.param("nodes: [{name: a}]", "nodes.0.gpus: Field required", id="no gpus"),
        pytest.param(
            "nodes: [{name: A b, gpus: 1, memory: 1Gi}]", "nodes.0.name", id="invalid name"
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 24 GB}]",
            "nodes.0.memory: Value error, '24 GB' is not a quantity",
            id="invalid quantity",
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 24Gi, replicas: 4}]",
            "4 replicas need sharing",
            id="replicas without sharing",
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 24Gi, sharing: mps}]",
            "needs replicas",
            id="sharing without replicas",
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 1Gi, reserved: 1Gi}]",
            "reserved must be less",
            id="no memory left",
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 1Gi}, {name: a, gpus: 1, memory: 1Gi}]",
            "node a is defined twice",
            id="repeated name",
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 1Gi, colour: red}]", "colour", id="unknown key"
        ),
        pytest.param(
            "nodes: [{name: a, gpus: 1, memory: 1Gi}]\nnamespaces: [{name: t, defaultVram: x}]",
            "annotation headroom.gpu/default-vram",
            id="invalid default of a namespace",
        ),
    ],
)
def test_an_error_has_its_position(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadSettings) as caught:
        load(tmp_path, text)
    assert says in str(caught.value)
    assert str(tmp_path / "fleet.yaml") in str(caught.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_fleet(tmp_path / "nowhere.yaml")
