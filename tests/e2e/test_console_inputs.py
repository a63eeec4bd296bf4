"""Checks that a console shows that an extender is missing, and that the extender works without a
console.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tests.answering import Answer, Request, answering
from tests.controllers.test_promql import body
from tests.e2e.conftest import NewCluster
from tests.e2e.test_console import Apart
from tests.loopback import LOOPBACK
from tests.reverse_proxy import proxy_to
from tests.serving import offer, pod


def inputs(apart: Apart) -> dict[str, dict[str, Any]]:
    found = (apart.get("/v1/inputs") or {}).get("inputs", [])
    return {each["kind"]: each for each in found}


def test_a_stopped_unreachable_or_killed_extender_is_shown_with_its_age(
    new_cluster: NewCluster,
) -> None:
    apart = Apart(new_cluster(1))
    cluster, plane = apart.cluster, apart.plane
    apart.start_extender()
    with proxy_to(f"http://127.0.0.1:{apart.journal}") as (proxy, wire):
        apart.start_console(follows=proxy.port)
        cluster.settle()

        def extender() -> dict[str, Any]:
            return inputs(apart).get("extender", {"message": "no console", "age_s": None})

        def is_heard() -> bool:
            return extender()["message"] is None

        cluster.until(is_heard, "the extender is followed")
        cluster.until(
            lambda: not any(each["message"] for each in inputs(apart).values()),
            "agents and API server are followed too",
        )
        seen = inputs(apart)
        assert seen.keys() == {"agents", "api_server", "extender"}
        assert all(each["age_s"] >= 0 for each in seen.values())

        plane.pause("extender")
        cluster.until(
            lambda: extender()["message"] == "it sent nothing for 15 s",
            "the console shows that the extender stopped sending",
        )
        silent = extender()
        assert silent["age_s"] >= 15.0
        cluster.until(lambda: extender()["age_s"] > silent["age_s"], "its age grows")
        assert [each["peer"] for each in apart.get("/v1/decisions")["unanswered"]] == [
            f"127.0.0.1:{proxy.port}"
        ]
        plane.resume("extender")
        cluster.until(is_heard, "it is followed again")

        wire.faults = {"cut off": 1.0}
        wire.cut()
        cluster.until(lambda: not is_heard(), "the console shows that it is cut off")
        assert inputs(apart)["api_server"]["message"] is None
        wire.faults = {}
        cluster.until(is_heard, "the wire is whole again")
        before = extender()["replica"]

        cluster.kill("extender")
        cluster.until(lambda: not is_heard(), "the console shows that it was killed")
        assert extender()["replica"] == before
        apart.start_extender()
        cluster.until(is_heard, "another extender is followed")
        assert extender()["replica"] != before


@contextmanager
def prometheus(ratios: Mapping[str, float]) -> Iterator[str]:
    """Yield the URL of a fake Prometheus. It answers each query with these SM activities, by
    device.
    """

    def answer(request: Request) -> Answer:
        at_s = time.time()
        series = [
            {"metric": {"UUID": uuid, "figure": shown}, "value": [at_s, str(value)]}
            for uuid, ratio in ratios.items()
            for shown, value in (("ratio", ratio), ("at", at_s - 1.0))
        ]
        return 200, body(*series)

    with answering(answer) as url:
        yield url


def test_without_console_and_prometheus_the_sm_activity_of_agents_decides(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2)
    apart = Apart(cluster)
    one, two = cluster.names
    # The agents report the opposite of the history.
    cluster.nodes.sm_activity = {one: 0.1, two: 0.8}
    with prometheus({f"GPU-{one}-0": 0.9, f"GPU-{two}-0": 0.2}) as history:
        apart.start_extender(
            prometheus_url=history,
            prometheus_refresh_s=1,
            prometheus_stale_after_s=3,
        )
        apart.start_console()
        cluster.settle()
        cluster.until(lambda: apart.get("/v1/inputs") is not None, "the console answers")
        cluster.until(lambda: chosen(apart) == two, "history decides")
        cluster.kill("console")
    cluster.until(lambda: chosen(apart) == one, "the agents' own samples decide")
    cluster.nodes.sm_activity = {one: 0.8, two: 0.1}
    cluster.nodes.report(cluster.names)
    cluster.until(lambda: chosen(apart) == two, "so do their later samples")


def chosen(apart: Apart) -> str:
    """Return the node that the extender prefers, or "" if neither node fits."""
    asked = offer(pod("asking", "2Gi", namespace="e2e"), *apart.cluster.names)
    url = f"http://127.0.0.1:{apart.verbs}"
    try:
        passed = LOOPBACK.post(f"{url}/filter", json=asked).json()["NodeNames"]
        ranked = LOOPBACK.post(f"{url}/prioritize", json=asked).json()
    except httpx.TransportError:
        return ""
    if set(passed or ()) != set(apart.cluster.names):
        return ""
    best = max(ranked, key=lambda each: each["Score"])
    return str(best["Host"])
