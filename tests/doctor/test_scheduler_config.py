"""Tests the doctor's findings about a KubeSchedulerConfiguration. The shipped configuration has no
findings.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.core.placement.policy import Rules
from headroom.doctor.findings import Finding, Weight
from headroom.doctor.scheduler_config import (
    examine_scheduler,
    offered_resources,
)
from headroom.errors import BadSettings
from headroom.runtime.settings.settings import Settings
from tests.controlplane import ROOT
from tests.deploy.mig_profiles import resource_names

SHIPPED = yaml.load(
    (ROOT / "deploy/base/kube-scheduler.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
)
DEFAULT = yaml.load(
    (ROOT / "deploy/default-scheduler/kube-scheduler.yaml").read_text(), yaml.CSafeLoader
)
#: Settings in which the deadline of binds is below any httpTimeout.
SETTINGS = Settings(bind_deadline_s=0.01)


def ours(config: Any) -> dict[str, Any]:
    """Return the entry that filters and binds."""
    (entry,) = (each for each in config["extenders"] if each.get("bindVerb"))
    found: dict[str, Any] = entry
    return found


def found(config: object, best_only: bool = True) -> list[Finding]:
    return examine_scheduler(config, SETTINGS.model_copy(update={"filter_best_only": best_only}))


def test_shipped_files_have_no_findings() -> None:
    assert found(SHIPPED) == []


def parts(of: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each part of a configuration. Of long lists, yield only the first parts."""
    yield path
    items = (
        of.items() if isinstance(of, dict) else enumerate(of[:3]) if isinstance(of, list) else ()
    )
    for key, value in items:
        yield from parts(value, (*path, key))


def replaced(of: Any, path: tuple[str | int, ...], value: object) -> Any:
    if not path:
        return value
    changed = copy.copy(of)
    changed[path[0]] = replaced(of[path[0]], path[1:], value)
    return changed


@pytest.mark.parametrize("value", [None, -1, True, "x", [1], ["a"], {"a": 1}], ids=repr)
@pytest.mark.parametrize("config", [SHIPPED, DEFAULT], ids=["own", "default"])
def test_a_part_of_another_type_does_not_hide_other_findings(config: Any, value: object) -> None:
    """kube-scheduler itself rejects such a configuration."""
    settings = SETTINGS.model_copy(update={"count_vram": True, "preempt_for_memory": True})
    for path in parts(config):
        with contextlib.suppress(BadSettings):
            examine_scheduler(replaced(config, path, value), settings)


@pytest.mark.parametrize(
    ("timeout", "deadline_s", "late"),
    [("5s", 4.0, False), ("4s", 4.0, True), ("500ms", 4.0, True), (None, 5.0, True)],
)
def test_a_bind_must_end_before_kube_scheduler_times_out(
    timeout: str | None, deadline_s: float, late: bool
) -> None:
    config = copy.deepcopy(SHIPPED)
    if timeout is None:
        del ours(config)["httpTimeout"]  # 5 s by default
    else:
        ours(config)["httpTimeout"] = timeout
    given = examine_scheduler(config, Settings(bind_deadline_s=deadline_s))
    assert any(each.do == "set bind_deadline_s below httpTimeout" for each in given) is late


@pytest.mark.parametrize("folder", ["base", "default-scheduler"])
def test_the_shipped_deadlines_match_the_shipped_schedulers(folder: str) -> None:
    config, settings = (
        yaml.load((ROOT / "deploy" / folder / name).read_text(encoding="utf-8"), yaml.CSafeLoader)
        for name in ("kube-scheduler.yaml", "headroom.yaml")
    )
    deadline_s = settings.get("bind_deadline_s", Settings().bind_deadline_s)
    given = examine_scheduler(config, Settings(bind_deadline_s=deadline_s))
    assert "set bind_deadline_s below httpTimeout" not in [each.do for each in given]


@pytest.mark.parametrize(
    ("change", "weight", "says"),
    [
        ({"ignorable": True}, Weight.WARNING, "set ignorable: false"),
        ({"nodeCacheCapable": False}, Weight.WARNING, "set nodeCacheCapable: true"),
        ({"filterVerb": ""}, Weight.WARNING, "set filterVerb: filter"),
        ({"httpTimeout": "100ms"}, Weight.ADVICE, "set httpTimeout: 5s"),
        ({"httpTimeout": "1m30s"}, Weight.ADVICE, "set httpTimeout: 5s"),
        ({"managedResources": [{"name": "nvidia.com/gpu"}]}, Weight.ADVICE, "remove managedRes"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_each_mistake_is_reported_with_its_position_and_the_fix(
    change: dict[str, Any], weight: Weight, says: str
) -> None:
    config = copy.deepcopy(SHIPPED)
    ours(config).update(change)
    (finding,) = found(config)
    assert (finding.weight, finding.nodes) == (weight, ("extenders[0]",))
    assert says in finding.do


def test_a_missing_bind_verb_is_reported() -> None:
    config = copy.deepcopy(DEFAULT)
    del ours(config)["bindVerb"]
    (finding,) = found(config)
    assert finding.do == "set bindVerb: bind"
    # If managedResources is also missing, the entry may be another extender.
    config = copy.deepcopy(SHIPPED)
    del ours(config)["bindVerb"]
    (finding,) = found(config)
    assert "does not call Headroom" in finding.found


def test_a_profile_that_counts_a_resource_only_for_quotas_is_a_warning() -> None:
    counting = Settings(count_vram=True)
    config = copy.deepcopy(SHIPPED)
    assert examine_scheduler(config, counting) == []
    config["profiles"][0]["pluginConfig"].pop(0)
    (finding,) = examine_scheduler(config, counting)
    assert (finding.weight, finding.nodes) == (Weight.WARNING, ("profiles[0]",))
    assert finding.do == (
        "set ignoredResources: [headroom.gpu/vram-bytes] in the args of NodeResourcesFit"
    )
    assert examine_scheduler(config, Settings()) == []


def test_preempt_for_memory_needs_the_preempt_verb() -> None:
    preempting = Settings(preempt_for_memory=True)
    config = copy.deepcopy(SHIPPED)
    assert examine_scheduler(config, preempting) == []
    del ours(config)["preemptVerb"]
    (finding,) = examine_scheduler(config, preempting)
    assert (finding.weight, finding.do) == (Weight.WARNING, "set preemptVerb: preempt")
    assert examine_scheduler(config, Settings()) == []


def test_the_default_scheduler_calls_headroom_for_every_documented_gpu_resource() -> None:
    names = Counter(each["name"] for each in ours(DEFAULT)["managedResources"])
    assert names == Counter(resource_names())
    offered = {name: ["n"] for name in names}
    assert examine_scheduler(DEFAULT, SETTINGS, offered) == []


def test_headrooms_own_scheduler_calls_headroom_for_every_resource() -> None:
    assert "managedResources" not in ours(SHIPPED)
    assert examine_scheduler(SHIPPED, SETTINGS, {"nvidia.com/mig-9g.999gb": ["n"]}) == []


def test_a_resource_that_kube_scheduler_ignores_is_a_warning() -> None:
    config = copy.deepcopy(DEFAULT)
    ours(config)["managedResources"][0]["ignoredByScheduler"] = True
    (finding,) = found(config)
    assert (finding.weight, finding.do) == (Weight.WARNING, "set ignoredByScheduler: false")


def test_a_resource_of_nodes_that_the_scheduler_does_not_manage_is_a_warning() -> None:
    mig, own = "nvidia.com/mig-9g.999gb", "nvidia.com/gpu"
    nodes = [
        Node(metadata=ObjectMeta(name=name), status=NodeStatus(allocatable={mig: "7", own: "0"}))
        for name in ("b", "a")
    ]
    offered = offered_resources(nodes, Rules().manages)
    assert offered == {mig: ["b", "a"], own: ["b", "a"]}
    (finding,) = examine_scheduler(DEFAULT, SETTINGS, offered)
    assert (finding.weight, finding.nodes) == (Weight.WARNING, ("extenders[0]",))
    assert f"{mig}, which 2 nodes offer (such as a)" in finding.found
    assert f"{{name: {mig}, ignoredByScheduler: false}}" in finding.do
    # Without managedResources, kube-scheduler calls Headroom for every pod in the cluster.
    every = copy.deepcopy(DEFAULT)
    del ours(every)["managedResources"]
    del every["profiles"][0]["schedulerName"]
    (finding,) = examine_scheduler(every, SETTINGS, offered)
    assert finding.weight is Weight.ADVICE
    assert "set managedResources" in finding.do


def test_a_weight_of_zero_is_reported_if_headroom_prioritizes() -> None:
    config = copy.deepcopy(SHIPPED)
    ours(config).update(prioritizeVerb="prioritize", weight=0)
    (finding,) = found(config)
    assert "set weight: 2" in finding.do


@pytest.mark.parametrize("percentage", [None, 0, 50])
def test_examining_only_a_sample_of_nodes_is_a_warning(percentage: int | None) -> None:
    config = copy.deepcopy(SHIPPED) | {"percentageOfNodesToScore": percentage}
    (finding,) = found(config)
    assert (finding.weight, finding.nodes) == (Weight.WARNING, ())
    assert finding.do == "set percentageOfNodesToScore: 100"
    # A profile can also set percentageOfNodesToScore.
    config["profiles"][0]["percentageOfNodesToScore"] = 100
    assert found(config) == []


def test_a_scheduler_with_another_extender_does_not_call_headroom() -> None:
    config = copy.deepcopy(SHIPPED)
    other = [{"urlPrefix": "http://127.0.0.1:1", "filterVerb": "filter"}]
    (finding,) = found(config | {"extenders": other})
    assert "does not call Headroom" in finding.found
    (finding,) = found(config | {"extenders": None})
    assert "does not call Headroom" in finding.found


def test_an_extender_after_headroom_is_reported_if_filter_returns_one_node() -> None:
    other = {"urlPrefix": "http://storage", "filterVerb": "filter"}
    after = SHIPPED | {"extenders": [*SHIPPED["extenders"], other]}
    (finding,) = found(after)
    assert (finding.weight, finding.nodes) == (Weight.WARNING, ("extenders[2]",))
    assert "filter_best_only: false" in finding.do
    assert found(after, best_only=False) == []
    assert found(SHIPPED | {"extenders": [other, *SHIPPED["extenders"]]}) == []


@pytest.mark.parametrize("config", [None, [], {}, {"kind": "Pod"}, SHIPPED | {"extenders": "us"}])
def test_an_invalid_configuration_is_rejected_with_an_example(config: object) -> None:
    with pytest.raises(BadSettings, match=r"deploy/base/kube-scheduler\.yaml"):
        found(config)
