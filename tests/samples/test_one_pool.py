"""Tests the manifests and commands of the page "Training and inference on the same nodes"."""

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import yaml

from agent.probes.plugin_config import _sharing
from headroom.contract.annotations import DEVICE_CHOICE, DeviceChoice
from headroom.contract.kube import Pod
from headroom.core.placement.request import VramRequest
from headroom.core.rules.eligible_nodes import Eligible
from headroom.core.whatif.simulation import Placed, Simulation
from headroom.planner.next_steps import plugin_config
from headroom.planner.scenarios import Configuration
from headroom.planner.simulated_fleet import Sharing, simulation_of
from headroom.planner.workload import Machine, Vram
from tests.controlplane import ROOT

GIB = 1 << 30
PAGE = (ROOT / "docs/how-to/one-pool.md").read_text()


def part(name: str) -> str:
    """Return the code block between two comments of the page, without its indentation."""
    inner = PAGE.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
    lines = inner.strip("\n").rstrip().splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    assert lines[0].strip().startswith("```")
    assert lines[-1].strip() == "```"
    return "\n".join(line[indent:] for line in lines[1:-1])


def plugin() -> dict[str, Any]:
    (config,) = yaml.safe_load(part("plugin"))["data"].values()
    found: dict[str, Any] = yaml.safe_load(config)
    return found


def pods() -> list[dict[str, Any]]:
    """Return the page's pods, and one for each row of its table."""
    written = list(yaml.safe_load_all(part("pods")))
    rows = [line for line in PAGE.splitlines() if "| `nvidia.com/gpu: " in line]
    assert len(rows) == 4
    for number, row in enumerate(rows):
        limit, amount = (cell.strip().strip("`") for cell in row.strip("| ").split("|")[1:])
        made = msgspec.json.decode(msgspec.json.encode(written[0]))
        made["metadata"] = {
            "name": f"row-{number}",
            "annotations": {"headroom.gpu/vram": amount},
        }
        made["spec"]["containers"][0]["resources"]["limits"] = yaml.safe_load(limit)
        written.append(made)
    return written


def placed(simulation: Simulation, cluster: Any, manifest: dict[str, Any]) -> Sequence[str]:
    """Return the devices that the pod gets."""
    name = manifest["metadata"]["name"]
    limits = manifest["spec"]["containers"][0]["resources"]["limits"]
    limits = {resource: str(count) for resource, count in limits.items()}
    raw = msgspec.json.decode(msgspec.json.encode(manifest))
    raw["metadata"]["uid"] = name
    raw["spec"]["containers"][0]["resources"]["limits"] = limits
    request = cluster.understand(msgspec.convert(raw, Pod, strict=False))
    assert isinstance(request, VramRequest), request
    at = simulation.place(request, Eligible(np.arange(1), {}))
    assert isinstance(at, Placed), at
    simulation.confirm(name, at)
    (charge,) = at.placement.charges
    return charge.choices


def test_the_configuration_of_the_plugin_lets_containers_request_several_replicas() -> None:
    assert _sharing(plugin()["sharing"]) == ("time-slicing", {"nvidia.com/gpu": 8}, False)


def test_a_plan_prints_the_same_configuration() -> None:
    printed = yaml.safe_load(
        plugin_config(Configuration("steered", 8, Vram("peaks"), one_pool=True))
    )
    given = yaml.safe_load(part("plugin"))
    assert printed["metadata"]["name"] == given["metadata"]["name"]
    assert yaml.safe_load(printed["data"]["gpu-8"]) == plugin()


def test_the_command_steers_a_node() -> None:
    *command, name, annotation = shlex.split(part("steer"))
    assert command == ["kubectl", "annotate", "--overwrite", "node"]
    assert name == "gpu-1"
    key, _, value = annotation.partition("=")
    assert key == DEVICE_CHOICE
    assert DeviceChoice(value) is DeviceChoice.STEERED


def test_all_pods_of_the_page_run_on_one_node() -> None:
    machine = Machine("gpu-1", "A100", 12, 40 * GIB)
    cluster, simulation = simulation_of([machine], Sharing(8, steered=True), 8)
    devices = {
        manifest["metadata"]["name"]: placed(simulation, cluster, manifest) for manifest in pods()
    }
    counts = {name: len(set(found)) for name, found in devices.items()}
    assert counts == {
        "inference": 1,
        "training": 4,
        "row-0": 1,
        "row-1": 1,
        "row-2": 4,
        "row-3": 2,
    }
    alone = [set(devices[name]) for name in ("training", "row-1", "row-2")]
    for own in alone:
        others = [each for each in map(set, devices.values()) if each != own]
        assert not any(own & each for each in others)


def test_the_pods_of_the_page_select_headroom() -> None:
    schedulers = [each["spec"]["schedulerName"] for each in yaml.safe_load_all(part("pods"))]
    assert schedulers == ["headroom", "headroom"]
