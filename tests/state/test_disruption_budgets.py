"""What kube-scheduler counts of a pod, and whom disruption budgets are about."""

from decimal import Decimal
from typing import Any

import pytest

from contract.kube import (
    Container,
    LabelSelector,
    NodeSelectorRequirement,
    ObjectMeta,
    Pod,
    PodSpec,
    ResourceRequirements,
)
from extender.state.pod_requests import amount, demands
from extender.state.pod_selectors import selects


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        ("100m", "0.1"),
        ("2", "2"),
        (3, "3"),
        ("1.5Gi", "1610612736"),
        ("1k", "1000"),
        ("1e3", "1000"),
        ("250u", "0.00025"),
        ("", "0"),
        ("Gi", "0"),
        ("NaN", "0"),
        ("Infinity", "0"),
        ("1e999999999", "0"),
        ("x" * 10_000, "0"),
    ],
)
def test_a_quantity_is_a_number(quantity: str | int, number: str) -> None:
    assert amount(quantity) == Decimal(number)


def holding(always: bool = False, **limits: str) -> Container:
    policy = "Always" if always else None
    return Container(resources=ResourceRequirements(limits=limits), restart_policy=policy)


def test_init_containers_count_where_they_are_larger_and_sidecars_always() -> None:
    of = Pod(
        metadata=ObjectMeta(),
        spec=PodSpec(
            init_containers=[holding(cpu="3"), holding(always=True, cpu="1"), holding(memory="5")],
            containers=[holding(cpu="500m"), holding(cpu="1", memory="2"), Container()],
            overhead={"cpu": "250m"},
        ),
    )
    assert demands(of) == {"cpu": Decimal("3.25"), "memory": Decimal(5)}


def test_a_request_counts_where_there_is_one() -> None:
    resources = ResourceRequirements(limits={"cpu": "4", "memory": "1"}, requests={"cpu": "1"})
    of = Pod(metadata=ObjectMeta(), spec=PodSpec(containers=[Container(resources=resources)]))
    assert demands(of) == {"cpu": Decimal(1), "memory": Decimal(1)}


def expression(operator: str, *values: str) -> dict[str, Any]:
    return {
        "match_expressions": [
            NodeSelectorRequirement(key="app", operator=operator, values=list(values))
        ]
    }


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        pytest.param({}, False, id="an empty one is about nobody"),
        pytest.param({"match_labels": {"app": "web"}}, True, id="label"),
        pytest.param({"match_labels": {"app": "web", "x": "y"}}, False, id="all labels"),
        pytest.param(expression("In", "web", "db"), True, id="in"),
        pytest.param(expression("NotIn", "web"), False, id="not in"),
        pytest.param(expression("NotIn", "db"), True, id="not in another"),
        pytest.param(expression("Exists"), True, id="exists"),
        pytest.param(expression("DoesNotExist"), False, id="does not exist"),
        pytest.param(expression("Gt", "1"), False, id="one that is not valid is about nobody"),
    ],
)
def test_whom_a_selector_is_about(selector: dict[str, Any], expected: bool) -> None:
    assert selects(LabelSelector(**selector), {"app": "web"}) is expected
