"""Checks that every query selects one cluster, and reads labels that Prometheus has renamed."""

import re

import pytest

from headroom.console.history.ranges import Range, of_holdings
from headroom.errors import BadSettings
from headroom.runtime.promql import Queries, check_matchers, own_label, own_labels
from headroom.runtime.settings.loading import load_settings

EU = Queries('cluster="eu-1"')


def every_query(of: Queries) -> list[str]:
    measured = [*of.use.values(), *of.peaks.values()]
    ranges = [
        *of.fleet(),
        *of.device("n", "GPU-a"),
        of.pod("ml", "p"),
        *of_holdings(of, Range(0, 9e4)),
    ]
    return [
        *of.sm_activity(0.95, 900),
        *(each.promql for each in ranges),
        *(of.totals(3) | of.lives | of.nodes | of.ended_lives).values(),
        *(each.promql for each in measured),
        *(each.suspects for each in measured if each.suspects),
    ]


def test_every_selector_has_the_matchers() -> None:
    for text in every_query(EU):
        metrics = re.findall(r"\b(?:headroom|kube|DCGM)_\w+(\{[^}]*\})?", text)
        assert metrics, text
        assert all('cluster="eu-1"}' in selector for selector in metrics), text


def test_without_matchers_no_selector_is_empty() -> None:
    assert not any("{}" in text for text in every_query(Queries()))


@pytest.mark.parametrize(
    "text",
    ["", 'cluster="a"', 'cluster=~"a|b", env!="test"', ' c = "a" ', r'a="\"}"', 'a!~"x,y"'],
)
def test_matchers_are_parsed_as_in_a_selector(text: str) -> None:
    assert check_matchers(text) == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        *('{cluster="a"}', "cluster=a", "cluster='a'", 'cluster="a"} or up{a="b"', 'cluster="a",'),
        *('__name__="up"', 'cluster="a" env="b"', r'cluster="a\"', "prod", 'a:b="c"', '1a="b"'),
    ],
)
def test_other_text_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of label matchers") as raised:
        check_matchers(text)
    assert repr(text) in str(raised.value)
    assert 'Example: cluster="eu-1"' in str(raised.value)


def test_the_setting_is_validated_and_requires_an_address() -> None:
    url = "http://prometheus:9090"
    found = load_settings(None, prometheus_url=url, prometheus_matchers='cluster="a"')
    assert found.queries == Queries('cluster="a"', found.resources)
    with pytest.raises(BadSettings, match="is not a list of label matchers"):
        load_settings(None, prometheus_url=url, prometheus_matchers="a")
    with pytest.raises(BadSettings, match="prometheus_matchers is set without prometheus_url"):
        load_settings(None, prometheus_matchers='cluster="a"')


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("nvidia_com_gpu", True),
        ("nvidia_com_gpu_shared", True),
        ("nvidia_com_mig_1g_10gb", True),
        ("nvidia_com_gpumem", False),
        ("nvidia_com_hostdev", False),
        ("cpu", False),
    ],
)
def test_resources_have_the_names_of_kube_state_metrics(name: str, matches: bool) -> None:
    assert (re.fullmatch(Queries().gpu_resources, name) is not None) == matches


def test_the_metrics_own_labels_are_read() -> None:
    labels = {"namespace": "monitoring", "exported_namespace": "ml", "pod": "a"}
    assert own_labels(labels)["namespace"] == own_label(labels, "namespace") == "ml"
    assert own_labels(labels)["pod"] == own_label(labels, "pod") == "a"
    assert own_label(labels, "uid") == ""
    old = {"namespace": "monitoring", "pod_namespace": "ml", "pod": "dcgm", "pod_name": "a"}
    assert (own_label(old, "namespace"), own_label(old, "pod")) == ("ml", "a")
