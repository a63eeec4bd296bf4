"""Checks that every alert is tested with promtool, is explained in docs/operate/alerts.md, and
links to its explanation.
"""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.debian import Unavailable, prometheus

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yaml"
UNIT_TESTS = Path(__file__).with_name("rules_test.yaml")
DOCS = ROOT / "docs/operate/alerts.md"


def alerts() -> dict[str, dict[str, object]]:
    groups = yaml.load(RULES.read_text(), yaml.CSafeLoader)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


@pytest.fixture(scope="module")
def promtool() -> str:
    try:
        return prometheus()[1]
    except Unavailable as err:
        pytest.skip(f"needs promtool: {err}")


@pytest.mark.slow
def test_alerts_fire_exactly_under_their_conditions(promtool: str) -> None:
    """promtool runs in the folder of the tests, because their path to the rules is relative."""
    for arguments in (("check", "rules", str(RULES)), ("test", "rules", UNIT_TESTS.name)):
        done = subprocess.run(
            [promtool, *arguments],
            cwd=UNIT_TESTS.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_every_alert_has_a_test_that_raises_it() -> None:
    raised = {
        name
        for test in yaml.load(UNIT_TESTS.read_text(), yaml.CSafeLoader)["tests"]
        for name in [
            *(t["alertname"] for t in test.get("alert_rule_test", ()) if t.get("exp_alerts")),
            *(
                re.search(r'alertname="(\w+)"', sample["labels"])[1]  # type: ignore[index]
                for t in test.get("promql_expr_test", ())
                for sample in t.get("exp_samples", ())
            ),
        ]
    }
    assert raised == alerts().keys()


@pytest.mark.parametrize("name", alerts())
def test_an_alert_has_all_required_annotations(name: str) -> None:
    rule = alerts()[name]
    labels, annotations = rule["labels"], rule["annotations"]
    assert isinstance(labels, dict)
    assert isinstance(annotations, dict)
    assert labels["severity"] in ("critical", "warning", "info")
    assert rule["for"]
    assert annotations["summary"]
    assert annotations["description"].endswith(f"docs/operate/alerts.md#{name.lower()}")


def test_the_docs_explain_exactly_these_alerts() -> None:
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.MULTILINE)[1:]
    explained = {section.splitlines()[0]: section for section in sections}
    assert list(explained) == list(alerts())
    for name, section in explained.items():
        assert "`" in section, f"{name} names nothing to look at"
        assert len(section.split()) < 120, f"{name} is no short paragraph"
