"""Checks that every port in the manifests has a row in docs/design/security.md."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from agent.liveness_probe import PORT
from agent.settings import read_settings
from tests.controlplane import ROOT
from tests.deploy.rendered import DEPLOY, PLATFORMS, objects, overlay, pod_specs
from tests.deploy.test_hardened import AGENT, spec_of

pytestmark = pytest.mark.slow

WITH_AGENT = [each for each in PLATFORMS if each != "trial"]


def documented() -> set[int]:
    page = (ROOT / "docs/design/security.md").read_text()
    text = page.partition("## Ports")[2].partition("\n## ")[0]
    return {int(port) for port in re.findall(r"^\| (\d+),", text, re.MULTILINE)}


def named(value: Any) -> Iterator[int]:
    """Yield the ports of containers and probes in all manifests."""
    if isinstance(value, list):
        for each in value:
            yield from named(each)
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("containerPort", "hostPort") or (key == "port" and isinstance(each, int)):
                yield each
            yield from named(each)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_port_has_its_row_on_the_page(platform: str) -> None:
    found = set(named(list(pod_specs(objects(overlay(DEPLOY / "overlays" / platform))).values())))
    assert found
    assert found <= documented()


def test_the_page_also_lists_the_ports_on_loopback() -> None:
    settings = read_settings([], {"NODE_NAME": "n"})
    assert {8888, 8889, 9443, settings.port, settings.local_port} <= documented()


@pytest.mark.parametrize("platform", WITH_AGENT)
def test_no_pod_reaches_the_endpoints_of_the_agents_probes(platform: str) -> None:
    """The endpoints must not be on this port, because every pod can reach a port that the kubelet
    can reach.
    """
    spec = spec_of(platform, AGENT)
    assert "hostNetwork" not in spec
    (container,) = spec["containers"]
    local_port = read_settings([], {"NODE_NAME": "n"}).local_port
    assert local_port == PORT == 9411
    assert local_port not in set(named(container["ports"]))
    for name, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[name]["exec"] == {
            "command": ["python", "-m", "agent.liveness_probe", path]
        }
