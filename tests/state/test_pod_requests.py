"""Tests requests of a pod, summed as kube-scheduler sums them."""

from decimal import Decimal

import pytest

from headroom.contract.kube import (
    Container,
    ObjectMeta,
    Pod,
    PodSpec,
    ResourceRequirements,
)
from headroom.core.rules.pod_requests import amount, demands


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
def test_quantities_are_parsed_as_numbers(quantity: str | int, number: str) -> None:
    assert amount(quantity) == Decimal(number)


def holding(always: bool = False, **limits: str) -> Container:
    policy = "Always" if always else None
    return Container(resources=ResourceRequirements(limits=limits), restart_policy=policy)


def test_init_containers_count_if_they_are_larger_and_sidecars_always() -> None:
    of = Pod(
        metadata=ObjectMeta(),
        spec=PodSpec(
            init_containers=[holding(cpu="3"), holding(always=True, cpu="1"), holding(memory="5")],
            containers=[holding(cpu="500m"), holding(cpu="1", memory="2"), Container()],
            overhead={"cpu": "250m"},
        ),
    )
    assert demands(of) == {"cpu": Decimal("3.25"), "memory": Decimal(5)}


def test_a_resource_counts_if_it_is_requested() -> None:
    resources = ResourceRequirements(limits={"cpu": "4", "memory": "1"}, requests={"cpu": "1"})
    of = Pod(metadata=ObjectMeta(), spec=PodSpec(containers=[Container(resources=resources)]))
    assert demands(of) == {"cpu": Decimal(1), "memory": Decimal(1)}
