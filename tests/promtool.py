"""Runs ``promtool check metrics``, which checks Prometheus' naming conventions."""

import subprocess

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.debian import prometheus

#: Labels that the Prometheus Operator adds to targets. An empty label in the metrics is replaced by
#: the label of the target.
_OF_TARGETS = {"namespace", "pod", "container", "node"}


def complaints(text: str) -> list[str]:
    """Return the problems that promtool finds in the body of /metrics, and problems of series that
    promtool does not check.

    Raise ``tests.debian.Unavailable`` if promtool cannot be downloaded.
    """
    done = subprocess.run(
        [prometheus()[1], "check", "metrics"],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert text.strip(), "no metrics"
    found = done.stdout.splitlines()
    found += [] if found or not done.returncode else [f"promtool ended with {done.returncode}"]
    return found + [
        problem for family in text_string_to_metric_families(text) for problem in _of(family)
    ]


def _of(family: Metric) -> list[str]:
    series = [(s.name, *sorted(s.labels.items())) for s in family.samples]
    found = [f"{family.name}: a series twice"] if len(set(series)) < len(series) else []
    if family.name.endswith("_created"):
        found.append(f"{family.name}: the time at which a series began is noise")
    empty = {name for s in family.samples for name, value in s.labels.items() if not value}
    found += [
        f"{family.name}: Prometheus replaces an empty {name} by the target's"
        for name in sorted(empty & _OF_TARGETS)
    ]
    return found
