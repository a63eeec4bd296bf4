"""Builds the scrape configurations that the Prometheus Operator would generate from Headroom's
monitors.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tests.deploy.rendered import DEPLOY

MONITORS = DEPLOY / "components/monitors/monitors.yaml"
_NAMESPACE = "headroom-system"


def monitors() -> dict[str, dict[str, Any]]:
    """Return the single endpoint of each monitor, by the monitor's name."""
    found = {}
    for monitor in yaml.safe_load_all(MONITORS.read_text()):
        if monitor["kind"] == "ServiceMonitor":
            (found[monitor["metadata"]["name"]],) = monitor["spec"]["endpoints"]
    return found


def job(name: str, address: str, node: str = "", **labels: str) -> dict[str, Any]:
    """Return a scrape configuration for a monitor with one target. It scrapes every second, without
    TLS.

    ``node`` is the node of the target's pod. ``labels`` are additional labels of the target.
    """
    endpoint = monitors()[name]
    target = {
        "__meta_kubernetes_pod_node_name": node,
        "namespace": _NAMESPACE,
        "pod": f"{name}-x2x7f",
        "container": name.removeprefix("headroom-"),
        "endpoint": endpoint["port"],
        "job": name,
        **labels,
    }
    return {
        "job_name": f"{name}/{address}/{sorted(labels.items())}",
        "honor_labels": endpoint.get("honorLabels", False),
        "honor_timestamps": endpoint.get("honorTimestamps", True),
        "static_configs": [{"targets": [address], "labels": target}],
        "relabel_configs": [_rule(each) for each in endpoint.get("relabelings", ())],
        "metric_relabel_configs": [_rule(each) for each in endpoint.get("metricRelabelings", ())],
    }


def _rule(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule with the names of its fields in the spelling of Prometheus."""
    return {re.sub("(?=[A-Z])", "_", key).lower(): value for key, value in of.items()}
