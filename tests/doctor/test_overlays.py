"""Compares NodeOverlays for Karpenter with Karpenter's own schema."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from headroom.commands import app
from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.errors import BadSettings
from headroom.overlays import (
    Capacity,
    PluginConfig,
    of_nodes,
    of_type,
    overlays,
    parse_plugin_config,
)
from tests.builders import GIB, GPU, device, gpunode, shared
from tests.state.test_cluster_state import seen, state_of

CRD = Path(__file__).parents[1] / "recorded/karpenter/karpenter.sh_nodeoverlays.yaml"
VERSION = yaml.load(CRD.read_text(), yaml.CSafeLoader)["spec"]["versions"][0]
SHARED = {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 4}]}}}
MIG = "nvidia.com/mig-1g.5gb"


def valid(text: str) -> list[dict[str, Any]]:
    """Return the documents. Fail if a document does not match the schema or has unknown fields."""
    found: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for each in found:
        schema = VERSION["schema"]["openAPIV3Schema"]
        jsonschema.validate(each, schema)
        assert each["apiVersion"] == f"karpenter.sh/{VERSION['name']}"
        assert each.keys() <= schema["properties"].keys()
        assert each["spec"].keys() <= schema["properties"]["spec"]["properties"].keys()
    return found


def capacities(*arguments: str, config: dict[str, Any] | None = None) -> Iterator[dict[str, str]]:
    plugin = parse_plugin_config(yaml.safe_dump(config or {}), "config.yaml")
    for each in valid("---\n".join(overlays([of_type(a, plugin, True) for a in arguments]))):
        yield each["spec"]["capacity"]


@pytest.mark.parametrize(
    ("given", "config", "expected"),
    [
        # This type has four 24 GB GPUs. The driver is assumed to reserve 1 GiB of each GPU.
        ("g6.12xlarge", {}, {GPU: "4", "headroom.gpu/vram": "87456"}),
        ("g6.12xlarge", SHARED, {GPU: "16", "headroom.gpu/vram": "87456"}),
        ("vm=2x48Gi", SHARED, {GPU: "8", "headroom.gpu/vram": "96256"}),
        (
            "vm=2x48Gi",
            {
                "sharing": {
                    "mps": {"renameByDefault": True, "resources": [{"name": "gpu", "replicas": 2}]}
                }
            },
            {GPU: "0", "nvidia.com/gpu.shared": "4", "headroom.gpu/vram": "96256"},
        ),
        (
            "p4d.24xlarge=56x1g.5gb",
            {"flags": {"migStrategy": "mixed"}},
            {GPU: "0", MIG: "56", "headroom.gpu/vram": "209664"},
        ),
        (
            "p4d.24xlarge=56x1g.5gb",
            {"flags": {"migStrategy": "single"}} | SHARED,
            {GPU: "224", "headroom.gpu/vram": "209664"},
        ),
    ],
)
def test_overlays_have_replicas_and_mig_devices_of_the_given_types(
    given: str, config: dict[str, Any], expected: dict[str, str]
) -> None:
    assert [*capacities(given, config=config)] == [expected]


def test_types_with_equal_resources_share_an_overlay() -> None:
    found = [
        of_type(each, PluginConfig(), False) for each in ("g6.xlarge", "g5.xlarge", "vm=2x9Gi")
    ]
    one, other = valid("---\n".join(overlays(found, "GPUs")))
    assert one["metadata"]["name"] == "headroom-gpus-g5.xlarge"
    assert one["spec"] == {
        "requirements": [
            {
                "key": "node.kubernetes.io/instance-type",
                "operator": "In",
                "values": ["g5.xlarge", "g6.xlarge"],
            },
            {"key": "karpenter.sh/nodepool", "operator": "In", "values": ["GPUs"]},
        ],
        "capacity": {GPU: "1"},
    }
    assert other["spec"]["capacity"] == {GPU: "2"}


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        (["nonsense"], {}, "instance type nonsense are not known: write NAME=COUNTxMEMORY"),
        (["vm=0x9Gi"], {}, "'vm=0x9Gi' is not an instance type"),
        (["vm=2xmuch"], {}, "vm=2xmuch: "),
        (["vm=7x1g.5gb"], {}, "no MIG devices with migStrategy 'none'"),
        (["vm=2x9Gi", "vm=1x9Gi"], {}, "vm is named 2 times"),
        (["vm=2x9Gi"], {"sharing": []}, "config.yaml: not a configuration of the device plugin"),
        (["vm=2x9Gi"], {"sharing": {"mps": {"resources": [{"name": "gpu"}]}}}, "'replicas'"),
    ],
)
def test_an_ambiguous_type_is_rejected_with_an_example(
    given: list[str], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadSettings) as failed:
        list(capacities(*given, config=config))
    assert message in str(failed.value)


def test_types_of_the_clusters_nodes_have_their_smallest_amounts() -> None:
    def node(name: str, instance_type: str) -> Node:
        labels = {"node.kubernetes.io/instance-type": instance_type} if instance_type else None
        metadata = ObjectMeta(name=name, uid=name, labels=labels)
        return Node(metadata=metadata, status=NodeStatus(allocatable={GPU: "8"}))

    mig = device("m", memory_bytes=5 * GIB, resource=MIG, kind="mig", parent="p")
    sick = shared("b", 4, healthy=False)
    state = state_of(
        *seen(node("one", "a"), node("two", "a"), node("mig", "b"), node("own", "")),
        *seen(
            gpunode(shared("a", 4), sick, name="one", uid="1"),
            gpunode(shared("a", 3), shared("b", 3), name="two", uid="2"),
            gpunode(mig, name="mig", uid="3"),
            gpunode(shared("a", 4), name="own", uid="4"),
        ),
    )
    found = of_nodes(state.cluster, mirror=True)
    assert found == [
        Capacity(
            "a",
            {GPU: 6, "headroom.gpu/vram": 49152},
            "the 2 nodes of a differ: the smallest amounts are shown",
        ),
        Capacity("b", {GPU: 0, MIG: 1, "headroom.gpu/vram": 5120}),
    ]
    text = "---\n".join(overlays(found))
    assert text.startswith("# the 2 nodes of a differ")
    assert [each["metadata"]["name"] for each in valid(text)] == ["headroom-a", "headroom-b"]


def test_the_command_prints_overlays_of_the_given_types(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(SHARED))
    arguments = ["overlays", "g6.xlarge", "--plugin-config", str(file), "--no-mirror"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (overlay,) = valid(result.stdout)
    assert overlay["spec"]["capacity"] == {GPU: "4"}
    result = CliRunner().invoke(app, ["overlays", "--plugin-config", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--plugin-config is for named types" in result.stderr
