"""Plays the crash at 3 a.m. on a real API server, and reads what the SRE reads: `kubectl headroom`,
the Event on the API server, and the page in a real browser.

One GPU of 24 GiB has three pods: llm reserved 8 GiB, chat 8 GiB and embed 4 GiB. Then llm uses 17.5
GiB, and the container of chat ends with an error of CUDA.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.cluster import EVENTS, NAMESPACE, PODS, PlayedCluster
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import GIB
from tests.kubectl.transcripts import run
from tests.page.conftest import browser  # noqa: F401
from tests.waiting import PATIENCE_S

MERGE = "application/merge-patch+json"
RESERVED = {"llm": "8Gi", "chat": "8Gi", "embed": "4Gi"}
QUIET = {"llm": 7 * GIB, "chat": 4 * GIB, "embed": 2 * GIB}
OVERUSE = {"llm": 35 * GIB // 2}
#: The GPU, the amount, the time and the pod that took the memory, which each place must show.
SINCE = r"since (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"
BLAME = f"pod {NAMESPACE}/llm uses 17.5 GiB, 9.5 GiB more than it reserved"
OVERCOMMITTED = re.compile(
    rf"GPU 0 of node gpu-1 is overcommitted by 5\.5 GiB {SINCE}: {re.escape(BLAME)}"
)


def set_status(cluster: PlayedCluster, name: str, **container: Any) -> None:
    """Write the status of a running pod as its kubelet would."""
    found = {"name": "main", "image": "", "imageID": "", "ready": True, "restartCount": 0}
    ready = {"type": "Ready", "status": "True"}
    status = {
        "phase": "Running",
        "conditions": [ready],
        "containerStatuses": [{**found, **container}],
    }
    cluster.plane.call("PATCH", f"{PODS}/{name}/status", {"status": status}, MERGE)


def use(cluster: PlayedCluster, used_bytes: Mapping[str, int]) -> None:
    """Report this use of the GPU."""
    cluster.nodes.set_used(used_bytes)
    cluster.nodes.report(cluster.names)


@pytest.fixture
def crashed(new_cluster: NewCluster) -> PlayedCluster:
    """The cluster after the crash."""
    cluster = new_cluster(1)
    cluster.bring_up()
    for name, vram in RESERVED.items():
        cluster.create_pod(name, vram)
    cluster.until(lambda: len(cluster.bound()) == len(RESERVED), "all pods are bound")
    for pod in cluster.bound():
        set_status(cluster, pod["metadata"]["name"])
        cluster.nodes.give(pod, 0)
    use(cluster, QUIET)
    cluster.until(lambda: "overcommitted" not in why(cluster, "chat"), "a quiet cluster is shown")
    use(cluster, OVERUSE)
    cluster.until(lambda: bool(OVERCOMMITTED.search(why(cluster, "chat"))), "the overuse is shown")
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": at, "startedAt": at}
    set_status(cluster, "chat", lastState={"terminated": ended}, restartCount=1)
    use(cluster, {"chat": 0})
    return cluster


def why(cluster: PlayedCluster, name: str) -> str:
    shown = run(cluster.debug_url(), "why", name, "-n", NAMESPACE)
    return shown.stdout + shown.stderr


def crash_events(cluster: PlayedCluster) -> Iterator[dict[str, Any]]:
    for each in cluster.plane.call("GET", EVENTS)["items"]:
        if each["reason"] == "CrashedOnOvercommittedGPU":
            yield each


@pytest.fixture
def page(browser: Browser, crashed: PlayedCluster) -> Iterator[Page]:  # noqa: F811
    opened = browser.new_page()
    opened.set_default_timeout(PATIENCE_S * 1000)
    expect.set_options(timeout=PATIENCE_S * 1000)
    yield opened
    opened.close()


def test_who_took_the_memory_is_read_in_kubectl_in_the_event_and_on_the_page(
    crashed: PlayedCluster, page: Page
) -> None:
    how = r"container main ended with exit code 1 \(Error\) at \S+Z and was restarted once"
    crashed.until(lambda: bool(re.search(how, why(crashed, "chat"))), "the crash is explained")
    lines = why(crashed, "chat").splitlines()
    headline = rf"Pod e2e/chat: bound to node gpu-1; {how}, while GPU 0 of node gpu-1 was "
    assert re.fullmatch(headline + rf"overcommitted: {re.escape(BLAME)}", lines[0])
    found = OVERCOMMITTED.search("\n".join(lines[1:]))
    assert found is not None
    age = datetime.now(UTC) - datetime.fromisoformat(found[1])
    assert 0 <= age.total_seconds() < PATIENCE_S

    crashed.until(lambda: any(crash_events(crashed)), "the API server has the Event")
    (event,) = crash_events(crashed)
    assert (event["type"], event["involvedObject"]["name"]) == ("Warning", "chat")
    assert re.match(how.replace("container", "Container"), event["message"])
    assert OVERCOMMITTED.search(event["message"]), event["message"]

    drift = run(crashed.debug_url(), "drift", "-n", NAMESPACE).stdout
    assert [line.split()[-1] for line in drift.splitlines() if " llm " in f" {line} "] != ["ok"]
    log = run(crashed.debug_url(), "log", "--since", "1h").stdout
    assert "overcommit_began" in log.split()

    page.goto(f"{crashed.debug_url()}/#/pod/{NAMESPACE}/chat")
    verdict = page.locator("#answer .verdict")
    expect(verdict).to_contain_text(f"while GPU 0 of node gpu-1 was overcommitted: {BLAME}")
    expect(verdict).to_have_class(re.compile(r"\bbad\b"))
    expect(page.get_by_role("list", name="Timeline")).to_contain_text("exit code 1")
    expect(page.locator("#view")).to_contain_text("is overcommitted by 5.5 GiB since")
    page.goto(f"{crashed.debug_url()}/#/overview")
    uses = f"{NAMESPACE}/llm uses 17.5 GiB and requested 8.0 GiB"
    expect(page.locator("#view")).to_contain_text(uses)
