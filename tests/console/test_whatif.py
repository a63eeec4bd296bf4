"""Tests /v1/whatif, which predicts placements and changes nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headroom.contract.gpunode import Device
from headroom.contract.kube import NodeSpec, ObjectMeta, Taint
from headroom.contract.watched import NodeSeen
from headroom.core.rules.pod_requests import QuotaSpec, QuotaStatus, ResourceQuota
from tests.builders import DISTRIBUTED, GIB, GPU, NOW_S, gpunode, kube_node, shared
from tests.console.asking import Asked
from tests.examples import examples
from tests.serving import binding, offer, pod, serving
from tests.state.digest import digest
from tests.state.test_simulation import seen, state_of, two_nodes

SOME_QUOTAS = "ResourceQuotas with scopes or for other resources than GPUs"


@pytest.fixture
def asked() -> Asked:
    """A cluster of the nodes a and b with two 24 GiB GPUs each. On node a are the pods a (20Gi), b
    (6Gi) and a DaemonSet's pod.
    """
    return Asked(NOW_S, two_nodes())


def ask(asked: Asked, **body: object) -> dict[str, Any]:
    asked.cluster.snapshot()  # Otherwise, the first request would create the snapshot.
    before = digest(asked.cluster)
    answer = asked.post("/v1/whatif", body)
    assert answer.status_code == 200, answer.text
    assert digest(asked.cluster) == before
    shown: dict[str, Any] = answer.json()
    return shown


def nodes(shown: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["pod"], each["node"]) for each in shown["placements"]]


def test_pods_are_placed_one_after_another_until_none_fits(asked: Asked) -> None:
    shown = ask(asked, pods=[{"vram": "16Gi", "count": 3}])
    assert nodes(shown) == [("default/asked-0-0", "b"), ("default/asked-0-1", "b")]
    first = shown["placements"][0]
    assert (first["devices"], first["most_bytes"]) == (["B0", "B1"], 16 * GIB)
    assert (shown["placed"], shown["rejected"]) == (2, 1)
    (rejected,) = shown["rejections"]
    assert rejected["pods"] == ["default/asked-0-2"]
    assert [(each["reason"], each["nodes"]) for each in rejected["reasons"]] == [
        ("memory_on_any", 1),
        ("memory_on_some", 1),
    ]
    (space,) = shown["spaces"]
    assert space["before"]["headroom_bytes"] - space["after"]["headroom_bytes"] == 2 * 16 * GIB
    assert (space["fullness_before"], space["fullness_after"]) == ("fits", "fragmented")


def test_nodes_are_removed_and_added_and_their_pods_move(asked: Asked) -> None:
    shown = ask(asked, drain=["a"], add=[{"like": "b"}], pods=[{"vram": "24Gi", "count": 3}])
    assert shown["added"] == ["b+1"]
    moved = [(each["pod"], each["leaves"]) for each in shown["placements"] if each["leaves"]]
    assert moved == [("default/b", "a"), ("default/a", "a")]
    assert "a" not in {each["node"] for each in shown["placements"]}
    assert shown["placed"] + shown["rejected"] == 5


def test_a_pod_fits_after_pods_are_released_and_replicas_added(asked: Asked) -> None:
    body: dict[str, Any] = {"pods": [{"vram": "1Gi", "count": 24}]}
    assert ask(asked, **body)["placed"] == 8
    freed = ask(asked, **body, release=["default/a", "default/b"])
    assert freed["placed"] == 15  # The DaemonSet's pod has a replica.
    assert ask(asked, **body, replicas={"b": 12})["placed"] == 24


def totals(shown: dict[str, Any], when: str) -> tuple[int, float, float, int, int]:
    """Return the number of pods, the reserved and free GiB, and the number of used and
    empty GPUs.
    """
    each = shown[when]
    return (
        each["pods"],
        *(each["reserved_bytes"] / GIB, each["headroom_bytes"] / GIB),
        *(each["devices_in_use"], each["devices_empty"]),
    )


def test_totals_count_pods_memory_and_gpus_before_and_after(asked: Asked) -> None:
    # On node a, a pod has 20 GiB of the first GPU. Two pods of 6 GiB and 1 GiB can be on either
    # GPU, so the first GPU counts as full, and 24 - 7 GiB of the second GPU are free.
    before = (3, 27.0, 17.0 + 48.0, 2, 2)
    # 8 GiB are reserved on both GPUs of b, but the pod will use only one GPU.
    placed = ask(asked, pods=[{"vram": "8Gi"}])
    assert totals(placed, "before") == before
    assert totals(placed, "after") == (4, 35.0, 17.0 + 32.0, 3, 1)
    # The pods of 20 GiB and 6 GiB move to different GPUs of b. Either GPU can get the larger pod.
    # The DaemonSet's pod ends.
    drained = ask(asked, drain=["a"])
    assert totals(drained, "before") == before
    assert totals(drained, "after") == (2, 26.0, 48.0 - 2 * 20.0, 2, 0)
    assert (drained["before"]["devices"], drained["after"]["devices"]) == (4, 2)
    released = ask(asked, release=["default/a", "default/b"], add=[{"like": "b"}])
    assert totals(released, "after") == (1, 1.0, 3 * 48.0 - 2 * 1.0, 1, 5)


def test_totals_before_equal_the_totals_of_the_fleet(asked: Asked) -> None:
    shown = ask(asked, pods=[{"vram": "16Gi", "count": 3}])
    models = asked.get("/v1/fleet").json()["models"]
    assert shown["before"]["headroom_bytes"] == sum(each["headroom_bytes"] for each in models)
    sums = asked.get("/v1/pods").json()["sums"]
    assert shown["before"]["reserved_bytes"] == sums["reserved_bytes"]
    assert (shown["after"]["pods"], shown["placed"], shown["rejected"]) == (5, 2, 1)


def test_a_pod_of_two_gpus_counts_on_both(asked: Asked) -> None:
    shown = ask(asked, pods=[{"vram": "8Gi", "gpus": 2}])
    (before, after) = (totals(shown, when) for when in ("before", "after"))
    assert after[1] - before[1] == 2 * 8.0
    assert (after[3] - before[3], after[4] - before[4]) == (2, -2)


def test_a_steered_node_takes_a_pod_that_the_plugin_could_misplace() -> None:
    def held(uuid: str, used_gib: int) -> Device:
        used = {"used_bytes": used_gib * GIB, "unattributed_bytes": used_gib * GIB}
        return shared(uuid, free=3, allocated=1, **used)

    report = gpunode(held("A", 2), held("B", 20), plugin=DISTRIBUTED)
    asked = Asked(NOW_S, state_of(*seen(kube_node("n"), report)))
    body: dict[str, Any] = {"pods": [{"vram": "8Gi"}]}
    assert ask(asked, **body)["placed"] == 0
    (placed,) = ask(asked, **body, device_choices={"n": "steered"})["placements"]
    assert (placed["node"], placed["devices"]) == ("n", ["A"])


def test_a_steered_node_takes_pods_one_after_another(asked: Asked) -> None:
    body: dict[str, Any] = {"pods": [{"vram": "11Gi", "count": 5}]}
    shown = ask(asked, **body, device_choices={"b": "steered"})
    assert nodes(shown) == [(f"default/asked-0-{number}", "b") for number in range(4)]
    on = [device for each in shown["placements"] for device in each["devices"]]
    assert sorted(on) == ["B0", "B0", "B1", "B1"]


def test_a_pod_of_a_manifest_is_placed_on_eligible_nodes(asked: Asked) -> None:
    (b,) = (node for node in asked.cluster.nodes() if node.metadata.name == "b")
    taint = Taint(key="team", value="x", effect="NoSchedule")
    asked.writer.apply([NodeSeen(msgspec.structs.replace(b, spec=NodeSpec(taints=[taint])))])
    sent = pod("train", "16Gi")
    shown = ask(asked, pods=[{"manifest": sent}])
    (kept_out,) = shown["rejections"][0]["ineligible"]
    assert (shown["placed"], kept_out["nodes"]) == (0, 1)
    assert kept_out["message"] == "taint team=x:NoSchedule, which the pod does not tolerate"
    sent["spec"]["tolerations"] = [{"operator": "Exists"}]
    assert nodes(ask(asked, pods=[{"manifest": sent}])) == [("default/train", "b")]


def quota(hard: str, used: str, *scopes: str) -> ResourceQuota:
    resource = "requests.nvidia.com/gpu"
    return ResourceQuota(
        metadata=ObjectMeta(name="team"),
        spec=QuotaSpec(scopes=list(scopes)),
        status=QuotaStatus(hard={resource: hard}, used={resource: used}),
    )


def ask_with(quotas: list[ResourceQuota] | None, **body: object) -> dict[str, Any]:
    return ask(Asked(NOW_S, two_nodes(), quotas=lambda namespace: quotas), **body)


@pytest.mark.parametrize(
    ("quotas", "placed", "not_checked"),
    [
        pytest.param([], 3, SOME_QUOTAS, id="none"),
        pytest.param([quota("4", "2")], 2, SOME_QUOTAS, id="enough for two pods"),
        pytest.param([quota("4", "2", "BestEffort")], 3, SOME_QUOTAS, id="with a scope"),
        pytest.param(None, 3, "ResourceQuotas", id="unreadable"),
    ],
)
def test_pods_that_a_quota_would_reject_are_not_placed(
    quotas: list[ResourceQuota] | None, placed: int, not_checked: str
) -> None:
    shown = ask_with(quotas, pods=[{"manifest": pod("train", "1Gi"), "count": 3}])
    assert (shown["placed"], shown["rejected"]) == (placed, 3 - placed)
    assert shown["not_checked"] == ["CPU, memory and other resources", not_checked]
    whys = [(each["pods"], each["not_tried"]) for each in shown["rejections"]]
    why = "ResourceQuota team would reject it for requests.nvidia.com/gpu"
    assert whys == ([(["default/train-2"], why)] if placed == 2 else [])


def test_a_memory_quota_counts_each_pod() -> None:
    resource = "requests.headroom.gpu/vram-bytes"
    status = QuotaStatus(hard={resource: "12Gi"}, used={resource: "2Gi"})
    memory = ResourceQuota(metadata=ObjectMeta(name="memory"), status=status)
    shown = ask_with([memory], pods=[{"manifest": pod("train", "4Gi"), "count": 3}])
    assert (shown["placed"], shown["rejected"]) == (2, 1)
    (rejection,) = shown["rejections"]
    assert rejection["not_tried"] == f"ResourceQuota memory would reject it for {resource}"


def test_a_quota_counts_moved_and_ended_pods_as_the_api_server_does() -> None:
    # Pods a and b of node a are deleted and created again.
    assert ask_with([quota("2", "2")], drain=["a"])["placed"] == 2
    lowered = ask_with([quota("1", "2")], drain=["a"])
    assert (lowered["placed"], lowered["rejected"]) == (1, 1)
    sent = [{"manifest": pod("train", "1Gi")}]
    assert ask_with([quota("2", "2")], pods=sent)["placed"] == 0
    assert ask_with([quota("2", "2")], pods=sent, release=["default/a"])["placed"] == 1


def test_no_quota_applies_to_a_size_because_it_has_no_namespace() -> None:
    shown = ask_with([quota("0", "0")], pods=[{"vram": "1Gi"}])
    assert (shown["placed"], shown["not_checked"][1]) == (1, "ResourceQuotas")


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        ({"schedulingGates": [{"name": "queue"}]}, "the pod has 1 scheduling gate (queue)"),
        ({"schedulerName": "other"}, "spec.schedulerName is other, which is not known to call"),
    ],
)
def test_a_manifest_for_a_foreign_scheduler_is_not_placed(
    asked: Asked, spec: dict[str, Any], reported: str
) -> None:
    sent = pod("train", "1Gi")
    sent["spec"] |= spec
    shown = ask(asked, pods=[{"manifest": sent}])
    ((rejected),) = shown["rejections"]
    assert rejected["not_tried"].startswith(reported)
    assert shown["message"].startswith(f"the pod is not placed: {reported}")


@pytest.mark.parametrize(
    ("body", "status", "reported"),
    [
        (
            {"pods": [{"vram": "1Gi", "count": 1001}]},
            400,
            "body pods: 1001 requested, the maximum is",
        ),
        (
            {"add": [{"like": "a", "count": 201}]},
            400,
            "body add: 201 requested, the maximum is 200",
        ),
        ({"pods": [{"vram": "much"}]}, 422, "body pods.0: annotation headroom.gpu/vram"),
        ({"pods": [{"vram": "1Gi", "size": 3}]}, 422, "body pods.0.size: "),
        ({"pods": [{"vram": "1Gi", "resource": "cpu"}]}, 422, "Example: nvidia.com"),
        ({"pods": [{"manifest": {"spec": {}}}]}, 422, "manifest: Object missing required field"),
        ({"pods": [{"manifest": {}, "vram": "1Gi"}]}, 422, "remove all other fields but count"),
        ({"drain": ["nowhere"]}, 422, "body drain: node nowhere has no known GPUs"),
        ({"add": [{"like": "nowhere"}]}, 422, "body add.like: node nowhere has"),
        ({"replicas": {"nowhere": 2}}, 422, "body replicas: node nowhere has"),
        ({"replicas": {"b": 0}}, 422, "body replicas.b: 0 is not from 1 to"),
        (
            {"device_choices": {"nowhere": "gated"}},
            422,
            "body device_choices: node nowhere has no known GPUs",
        ),
        ({"device_choices": {"a": "any"}}, 422, "body device_choices.a: "),
        (
            {"replicas": {"b": 1}, "device_choices": {"b": "steered"}},
            422,
            "body device_choices.b: steered, but no device of b is shared",
        ),
        ({"release": ["default/unknown"]}, 422, "pod default/unknown holds no GPU"),
        ([], 422, "Example: "),
    ],
)
def test_an_invalid_query_is_rejected_with_the_position_of_the_mistake(
    asked: Asked, body: object, status: int, reported: str
) -> None:
    answer = asked.post("/v1/whatif", body)
    assert (answer.status_code, reported in answer.json()["detail"]) == (status, True), answer.text


def test_a_body_that_is_too_large_is_rejected(asked: Asked) -> None:
    answer = asked.post("/v1/whatif", {"release": ["x" * 1000] * 1100})
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:headroom:problem:too-large")


def test_a_body_that_is_not_sent_as_json_is_rejected_with_the_required_header() -> None:
    """The error names the header because curl -d sends another content type by default."""
    transport = httpx.ASGITransport(Asked().app)

    async def sent() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://debug") as client:
            form = {"Content-Type": "application/x-www-form-urlencoded"}
            return await client.post("/v1/whatif", content='{"pods": []}', headers=form)

    answer = asyncio.run(sent())
    assert answer.status_code == 422
    assert "-H 'Content-Type: application/json'" in answer.json()["detail"]


def test_a_body_without_content_length_is_rejected(asked: Asked) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"{}"

    async def asking() -> httpx.Response:
        transport = httpx.ASGITransport(asked.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://debug") as client:
            return await client.post("/v1/whatif", content=pieces())

    answer = asyncio.run(asking())
    assert (answer.status_code, "Content-Length" in answer.json()["detail"]) == (411, True)
    assert answer.json()["type"] == "urn:headroom:problem:length-required"


names = st.sampled_from(["a", "b", "nowhere"])
whatifs = st.fixed_dictionaries(
    {},
    optional={
        "pods": st.lists(
            st.fixed_dictionaries(
                {"vram": st.sampled_from(["", "1Gi", "16Gi", "50%", "1Ti"])},
                optional={"count": st.integers(1, 9), "gpus": st.integers(1, 3)},
            ),
            max_size=3,
        ),
        "drain": st.lists(names, max_size=2),
        "replicas": st.dictionaries(names, st.integers(1, 9), max_size=2),
        "device_choices": st.dictionaries(
            names, st.sampled_from(["predicted", "gated", "steered"])
        ),
        "add": st.lists(st.fixed_dictionaries({"like": names}), max_size=2),
        "release": st.lists(st.sampled_from(["default/a", "default/b", "x/y"]), max_size=2),
    },
)
_same = Asked(NOW_S, two_nodes())
_same.cluster.snapshot()
_before = digest(_same.cluster)


@settings(max_examples=examples(150), deadline=None)
@given(whatifs)
def test_a_what_if_changes_nothing(body: dict[str, Any]) -> None:
    answer = _same.post("/v1/whatif", body)
    assert answer.status_code in (200, 422), answer.text
    assert digest(_same.cluster) == _before
    if answer.status_code == 200:
        assert _same.post("/v1/whatif", body).json()["placements"] == answer.json()["placements"]


FLEET = """
nodes:
  - {name: small, gpus: 1, memory: 16Gi, sharing: time-slicing, replicas: 2}
  - {name: large, gpus: 2, memory: 40Gi, sharing: time-slicing, replicas: 4}
  - {name: whole, gpus: 2, memory: 24Gi}
"""


@pytest.mark.slow
def test_pods_are_placed_by_kube_scheduler_calls_as_predicted() -> None:
    with serving(FLEET) as server:
        burst = [{"vram": vram, "count": 3} for vram in ("6Gi", "20Gi", "13Gi")]
        shown = server.debug_post("/v1/whatif", {"pods": burst}).json()
        reported = {each["pod"]: each["node"] for each in shown["placements"]}
        assert reported
        assert shown["rejected"]
        for kind, some in enumerate(burst):
            for n in range(3):
                name = f"asked-{kind}-{n}"
                sent = pod(name, str(some["vram"]), resource=GPU)
                sent["metadata"]["uid"] = name
                passed = server.post("/filter", offer(sent, "small", "large", "whole")).json()
                if not passed["NodeNames"]:
                    assert f"default/{name}" not in reported
                    continue
                ranked = server.post("/prioritize", offer(sent, *passed["NodeNames"])).json()
                best = max(ranked, key=lambda each: each["Score"])["Host"]
                assert reported[f"default/{name}"] == best
                assert server.post("/bind", binding(sent, best)).json()["Error"] == ""
