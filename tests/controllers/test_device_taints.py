"""Tests the device taint controller with a simulated API server."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Lease, ObjectMeta
from headroom.contract.watched import ClaimSeen, GPUNodeGone, GPUNodeSeen, HeartbeatSeen, SliceSeen
from headroom.dra_taints.controller import DeviceTaintsController, Reports
from headroom.dra_taints.metrics import TaintTelemetry
from headroom.dra_taints.taint_rules import NOT_SERVED, TaintRules
from headroom.runtime.follow.claims import Claims
from headroom.runtime.kube.api_errors import ApiError, ApiStatus, NoAnswer
from headroom.runtime.kube.client import KubeApi, Listing
from tests.monitoring.documented import documented
from tests.promtool import complaints
from tests.state.test_claimed_devices import claim, piece, report

FIRST_HOLD_S = 3.0
LIST_EVERY_S = 60.0

GIB = 1 << 30
STALE_AFTER_S = 90.0
MINE = {"app.kubernetes.io/managed-by": "headroom-device-taints"}
GROUP = "/apis/resource.k8s.io"


class FakeApi:
    """Serves one API version of DeviceTaintRule. If ``fault`` is set, writes raise it."""

    def __init__(self, version: str = "v1beta2") -> None:
        self.version = version
        self.rules: dict[str, dict[str, Any]] = {}
        self.writes: list[str] = []
        self.fault: ApiError | None = None

    def call(self, method: str, path: str, body: bytes | None = None, **_: Any) -> bytes:
        if path.startswith("/apis/admissionregistration.k8s.io"):
            return b'{"metadata": {"uid": "policy-uid"}}'
        version, _, rest = path.removeprefix(f"{GROUP}/").partition("/")
        if version != self.version:
            raise ApiStatus(f"{method} {path}", 404, "not found")
        if not rest:
            return b'{"resources": [{"name": "resourceslices"}, {"name": "devicetaintrules"}]}'
        self.writes.append(method)
        if self.fault is not None:
            raise self.fault
        given = json.loads(body or b"")
        if method == "POST":
            given["metadata"]["uid"] = f"uid-{len(self.writes)}"
            self.rules[given["metadata"]["name"]] = given
            return json.dumps(given).encode()
        name = rest.rpartition("/")[2]
        if name not in self.rules:
            raise ApiStatus(f"{method} {path}", 404, "not found")
        if self.rules[name]["metadata"]["uid"] != given["preconditions"]["uid"]:
            raise ApiStatus(f"{method} {path}", 409, "precondition failed")
        del self.rules[name]
        return b"{}"

    def list(
        self, path: str, take: Callable[[msgspec.Raw], Any], *, query: Any, page_size: int
    ) -> Listing[Any]:
        if not path.startswith(f"{GROUP}/{self.version}/"):
            raise ApiStatus(f"GET {path}", 404, "not found")
        key, _, value = query["labelSelector"].partition("=")
        found = [
            take(msgspec.Raw(json.dumps(each).encode()))
            for each in self.rules.values()
            if each["metadata"].get("labels", {}).get(key) == value
        ]
        return Listing(found, "1")


class TaintedNode:
    def __init__(self, version: str = "v1beta2") -> None:
        self.api = FakeApi(version)
        self.now_s = 1000.0
        self.leads, self.observes = True, False
        self.claims = Claims(lambda: self.now_s)
        self.reports = Reports(self.claims, lambda: None)
        self.telemetry = TaintTelemetry(CollectorRegistry())
        self.controller = self.new_controller()
        self.reports.apply([SliceSeen(piece()), ClaimSeen(claim("c", "a", "8Gi"))])

    def new_controller(self) -> DeviceTaintsController:
        return DeviceTaintsController(
            self.reports,
            self.claims,
            TaintRules(cast(KubeApi, self.api)),
            lambda: self.leads,
            lambda: self.observes,
            STALE_AFTER_S,
            self.telemetry,
            lambda: self.now_s,
        )

    def reported(self, unattributed_gib: int = 0, **used_gib: float) -> None:
        node = GPUNode(
            metadata=ObjectMeta(name="n"), status=report(unattributed_gib * GIB, **used_gib)
        )
        self.reports.apply([GPUNodeSeen(node, self.now_s)])

    def round(self, after_s: float = 1.0) -> list[str]:
        """Run a round ``after_s`` seconds later. Return the devices that have a rule."""
        self.now_s += after_s
        asyncio.run(self.controller.round())
        return [each["spec"]["deviceSelector"]["device"] for each in self.api.rules.values()]

    def written(self, outcome: str) -> float:
        value = self.telemetry.registry.get_sample_value(
            "headroom_device_taint_writes_total", {"outcome": outcome}
        )
        assert value is not None
        return value


@pytest.fixture
def world() -> TaintedNode:
    return TaintedNode()


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1alpha3"])
def test_a_device_is_tainted_in_the_served_version_and_the_taint_is_removed(version: str) -> None:
    world = TaintedNode(version)
    world.reported(a=8)
    assert world.round() == []
    world.reported(5, a=8)
    assert world.round() == ["gpu-0"]
    (rule,) = world.api.rules.values()
    assert rule["apiVersion"] == f"resource.k8s.io/{version}"
    assert rule["spec"] == {
        "deviceSelector": {"driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"},
        "taint": {"key": "headroom.gpu/use-beyond-claims", "value": "true", "effect": "NoSchedule"},
    }
    assert rule["metadata"]["labels"] == MINE
    assert rule["metadata"]["annotations"] == {
        "headroom.gpu/node": "n",
        "headroom.gpu/device": "GPU-0",
    }
    assert rule["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "name": "headroom-device-taints",
            "uid": "policy-uid",
        }
    ]
    world.reported(a=8)
    assert world.round() == ["gpu-0"]
    assert world.round(FIRST_HOLD_S) == []
    assert (world.written("created"), world.written("deleted")) == (1, 1)
    assert world.api.writes == ["POST", "DELETE"]


def test_use_beyond_a_claim_taints_the_device_and_a_larger_claim_removes_the_taint(
    world: TaintedNode,
) -> None:
    world.reported(a=9)
    assert world.round() == ["gpu-0"]
    world.reports.apply([ClaimSeen(claim("d", "a", "4Gi"))])
    assert world.round() == ["gpu-0"]
    assert world.round(FIRST_HOLD_S) == []


def test_without_served_rules_the_obstacle_is_reported_until_they_are_served() -> None:
    world = TaintedNode("v2")
    world.reported(5)
    assert world.round() == []
    assert world.controller.obstacle == NOT_SERVED
    world.api.version = "v1beta2"
    assert world.round() == ["gpu-0"]
    assert world.controller.obstacle == ""


def test_another_version_is_used_after_an_upgrade_of_the_api_server(world: TaintedNode) -> None:
    world.reported(5)
    assert world.round() == ["gpu-0"]
    world.api.version = "v1"
    with pytest.raises(ApiStatus):
        world.round(LIST_EVERY_S)
    assert world.round() == ["gpu-0"]
    world.reported()
    world.round()
    assert world.round(FIRST_HOLD_S) == []


def test_only_the_leader_writes_and_the_next_leader_continues(world: TaintedNode) -> None:
    world.leads = False
    world.reported(5)
    assert world.round() == []
    world.leads = True
    assert world.round() == ["gpu-0"]
    world.leads = False
    world.reported()
    assert world.round(60.0) == ["gpu-0"]
    world.leads, world.controller = True, world.new_controller()
    world.reports.apply([SliceSeen(piece())])  # Every process lists all rules at its start.
    assert world.round() == ["gpu-0"]
    assert world.round(FIRST_HOLD_S) == []


def test_mode_observe_writes_nothing_and_removes_taints(world: TaintedNode) -> None:
    world.reported(5)
    assert world.round() == ["gpu-0"]
    world.observes = True
    assert world.round() == []
    world.api.writes.clear()
    assert world.round() == []
    assert world.api.writes == []


def test_the_rules_of_a_removed_node_are_deleted(world: TaintedNode) -> None:
    world.reported(5)
    assert world.round() == ["gpu-0"]
    world.reports.apply([GPUNodeGone("n")])
    assert world.round() == []


def test_rules_of_others_stay_and_our_changed_rules_are_replaced(world: TaintedNode) -> None:
    place = {"driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0"}
    spec = {
        "deviceSelector": place,
        "taint": {"key": "k", "value": "v", "effect": "NoExecute"},
    }
    changed = {"metadata": {"name": "headroom-x", "uid": "1", "labels": MINE}, "spec": spec}
    other = {"metadata": {"name": "other", "uid": "2"}, "spec": spec}
    world.api.rules = {"headroom-x": changed, "other": other}
    world.reported(5)
    world.round()
    assert world.api.rules.pop("other") == other
    (rule,) = world.api.rules.values()
    assert (rule["spec"]["deviceSelector"], rule["spec"]["taint"]["effect"]) == (
        place,
        "NoSchedule",
    )


def test_a_rule_that_a_user_deleted_is_created_again(world: TaintedNode) -> None:
    world.reported(5)
    assert world.round() == ["gpu-0"]
    world.api.rules.clear()
    world.reports.apply([HeartbeatSeen(Lease(metadata=ObjectMeta(name="n")), world.now_s + 50)])
    assert world.round(LIST_EVERY_S) == ["gpu-0"]


def test_a_rule_that_replaced_ours_is_deleted_when_it_is_listed(world: TaintedNode) -> None:
    world.reported(5)
    world.round()
    (name,) = world.api.rules
    world.api.rules[name]["metadata"]["uid"] = "successor"
    world.reported()
    world.round()
    assert world.round(FIRST_HOLD_S) == ["gpu-0"]
    assert world.round() == []


def test_a_failed_write_is_repeated(world: TaintedNode) -> None:
    world.reported(5)
    world.api.fault = NoAnswer("no answer")
    assert world.round() == []
    assert world.written("failed") == 1
    world.api.fault = None
    assert world.round() == ["gpu-0"]
    world.reported()
    world.round()
    world.api.fault = NoAnswer("no answer")
    assert world.round(FIRST_HOLD_S) == ["gpu-0"]
    world.api.fault = None
    assert world.round() == []


def test_metrics_are_documented(world: TaintedNode) -> None:
    world.reported(5)
    world.round()
    text = world.telemetry.exposition(True).decode()
    assert complaints(text) == []
    families = {
        each.name + {"counter": "_total", "info": "_info"}.get(each.type, ""): each
        for each in text_string_to_metric_families(text)
    }
    own = documented("The controller of device taints")
    assert own.keys() == {name for name in families if name.startswith("headroom_device_taint")}
    for name, row in own.items():
        labels = {label for sample in families[name].samples for label in sample.labels}
        assert (families[name].type, labels) == (row.type, set(row.labels)), name
    assert "\nheadroom_device_taints 1.0\n" in text
    assert "\nheadroom_device_taints_leads 1.0\n" in text


def test_an_old_report_taints_nothing_until_a_heartbeat_confirms_it(world: TaintedNode) -> None:
    world.reported(5)
    assert world.round(STALE_AFTER_S + 1) == []
    world.reports.apply([HeartbeatSeen(Lease(metadata=ObjectMeta(name="n")), world.now_s)])
    assert world.round() == ["gpu-0"]
