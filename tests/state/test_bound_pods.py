"""Checks that requests of bound pods are counted as in kube-scheduler, to decide whether another
pod fits.
"""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from headroom.core.rules.bound_pods import BoundPod, bound_demands, exceeded_by
from headroom.core.rules.pod_requests import Demands

MAIN = [{"name": "main", "resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}]


def demands_of(spec: dict[str, Any], status: dict[str, Any] | None = None) -> Demands:
    content = {"metadata": {"uid": "u"}, "spec": spec, "status": status or {}}
    return bound_demands(msgspec.json.decode(msgspec.json.encode(content), type=BoundPod))


def cpu_of(spec: dict[str, Any], status: dict[str, Any] | None = None) -> Decimal:
    return demands_of(spec, status)["cpu"]


def resized(allocated: str | None, applied: str | None, *conditions: str) -> dict[str, Any]:
    """Return the status of a container ``main`` and the reasons of PodResizePending."""
    container: dict[str, Any] = {"name": "main"}
    if allocated:
        container["allocatedResources"] = {"cpu": allocated}
    if applied:
        container["resources"] = {"requests": {"cpu": applied}}
    return {
        "containerStatuses": [container],
        "conditions": [{"type": "PodResizePending", "reason": reason} for reason in conditions],
    }


def test_requests_are_summed_like_in_kube_scheduler() -> None:
    """The expected sums were computed by kube-scheduler's own function
    (go_pod_requests/README.md)."""
    table = json.loads(Path(__file__).with_name("pod_requests_table.json").read_text())
    assert len(table) == 150
    for case in table:
        expected = {name: Decimal(text) for name, text in case["requests"].items()}
        assert demands_of(case["spec"], case["status"]) == expected, case


def test_containers_sidecars_and_overhead_add_up() -> None:
    sidecar = {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}}
    spec = {"containers": MAIN, "initContainers": [sidecar], "overhead": {"cpu": "250m"}}
    assert demands_of(spec) == {"cpu": Decimal("2.75"), "memory": Decimal(1 << 30)}


def test_a_larger_init_container_counts_with_the_sidecars_before_it() -> None:
    init = [
        {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
        {"name": "load", "resources": {"requests": {"cpu": "4"}}},
    ]
    assert cpu_of({"containers": MAIN, "initContainers": init}) == 5


@pytest.mark.parametrize(
    ("status", "cpus"),
    [
        pytest.param(resized("2", "2"), 2, id="not resized"),
        pytest.param(resized("3", "2"), 3, id="reserved, not applied yet"),
        pytest.param(resized("1", "3"), 3, id="reduced, not applied yet"),
        pytest.param(resized("1", "1", "Deferred"), 2, id="deferred"),
        pytest.param(resized("1", "1", "Infeasible"), 1, id="infeasible"),
        pytest.param({}, 2, id="no status"),
    ],
)
def test_while_a_pod_is_resized_the_largest_amount_counts(
    status: dict[str, Any], cpus: int
) -> None:
    assert cpu_of({"containers": MAIN}, status) == cpus


def test_requests_of_the_whole_pod_replace_those_of_its_containers() -> None:
    spec = {"containers": MAIN, "resources": {"requests": {"cpu": "8"}}, "overhead": {"cpu": "1"}}
    assert demands_of(spec) == {"cpu": Decimal(9), "memory": Decimal(1 << 30)}
    larger = {"resources": {"requests": {"cpu": "9"}}, "allocatedResources": {"cpu": "10"}}
    assert cpu_of(spec, larger) == 11


def test_extended_resources_cannot_be_requested_for_the_whole_pod() -> None:
    spec = {"containers": MAIN, "resources": {"requests": {"example.com/nic": "8"}}}
    assert demands_of(spec) == {"cpu": Decimal(2), "memory": Decimal(1 << 30)}


class TestExceeded:
    NODE: ClassVar = {"cpu": "4", "memory": "8Gi", "pods": "3"}

    @pytest.mark.parametrize(
        ("cpus", "others", "is_exceeded"),
        [
            pytest.param(2, [2], False, id="exactly full"),
            pytest.param(2, [1, "1100m"], True, id="slightly too much"),
            pytest.param(1, [0, 0, 0], True, id="too many pods"),
            pytest.param(0, [9], False, id="a resource that the pod does not request"),
        ],
    )
    def test_exceeded_resources_include_the_number_of_pods(
        self, cpus: int, others: list[int | str], is_exceeded: bool
    ) -> None:
        on_node = [{"cpu": bound["cpu"]} for bound in map(_of_cpu, others)]
        assert exceeded_by({"cpu": Decimal(cpus)}, on_node, self.NODE) is is_exceeded

    def test_a_resource_that_the_node_does_not_offer_is_ignored(self) -> None:
        assert not exceeded_by({"example.com/nic": Decimal(1)}, [], self.NODE)


def _of_cpu(quantity: int | str) -> Demands:
    container = {"name": "main", "resources": {"requests": {"cpu": quantity}}}
    return demands_of({"containers": [container]})
