"""Tests the verbs over HTTP, called as kube-scheduler calls them until the pod is bound."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.processes import starts_processes
from tests.serving import Server, binding, offer, pod, serving
from tests.waiting import until

GI = 1 << 30
FLEET = """
nodes:
  - {name: shared, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: large, gpus: 1, memory: 80Gi, sharing: time-slicing, replicas: 4}
  - {name: pair, gpus: 2, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: whole, gpus: 2, memory: 40Gi}
namespaces: [{name: team, defaultVram: 6Gi}]
"""


@pytest.fixture
@starts_processes
def server() -> Iterator[Server]:
    with serving(FLEET) as running:
        yield running


def passed(server: Server, shown: dict[str, Any], *nodes: str) -> list[str]:
    return list(server.post("/filter", offer(shown, *nodes)).json()["NodeNames"])


def bind(server: Server, shown: dict[str, Any], node: str) -> str:
    return str(server.post("/bind", binding(shown, node)).json()["Error"])


def eventually(holds: Callable[[], bool]) -> None:
    until(holds, "the server has processed it")


def devices(server: Server, node: str) -> list[dict[str, Any]]:
    return list(server.get(f"/v1/nodes/{node}").json()["node"]["devices"])


def test_four_pods_that_need_60_gib_do_not_share_24(server: Server) -> None:
    bound = []
    for i, vram in enumerate(["20Gi", "16Gi", "16Gi", "8Gi"]):
        shown = pod(f"p{i}", vram)
        if passed(server, shown, "shared"):
            assert bind(server, shown, "shared") == ""
            bound.append(vram)
    assert bound == ["20Gi"]
    (device,) = devices(server, "shared")
    assert device["headroom_bytes"] == 4 * GI
    assert [holder["name"] for holder in device["holders"]] == ["p0"]


def test_bind_checks_again_if_another_filter_call_came_first(server: Server) -> None:
    first, second = pod("first", "16Gi"), pod("second", "16Gi")
    assert passed(server, first, "shared", "large")
    assert passed(server, second, "shared", "large")
    assert bind(server, first, "shared") == ""
    assert bind(server, second, "shared") == "insufficient GPU memory on any device"


def test_filter_holds_memory_for_the_pod_that_is_bound_next(server: Server) -> None:
    """A busy machine may need several tries, because the hold lasts only a quarter of a second."""
    first, second = pod("first", "16Gi"), pod("second", "16Gi")

    def one_after_the_other() -> tuple[list[str], list[str]]:
        return passed(server, first, "shared"), passed(server, second, "shared", "large")

    eventually(lambda: one_after_the_other() == (["shared"], ["large"]))
    # The memory that is held for a pod does not count against this pod.
    assert passed(server, first, "shared") == ["shared"]
    assert passed(server, first, "unknown-node") == []
    assert passed(server, second, "shared") == ["shared"]  # The first bind is no longer expected.
    assert passed(server, first, "large", "shared", "pair")
    assert passed(server, second, "unknown-node") == []

    def rejected() -> Any:
        eventually(lambda: passed(server, first, "shared") == ["shared"])
        return server.post("/filter", offer(second, "shared")).json()["FailedAndUnresolvableNodes"]

    held = {"shared": "GPU memory is held for another pod, which goes first"}
    eventually(lambda: rejected() == held)
    # No memory was reserved, because the bind was never called.
    eventually(lambda: passed(server, second, "shared") == ["shared"])


def test_filter_holds_memory_on_the_node_that_prioritize_ranked_first(server: Server) -> None:
    first, second = pod("first", "16Gi"), pod("second", "16Gi")

    def one_after_the_other() -> list[str]:
        names = passed(server, first, "shared", "large")
        scores = server.post("/prioritize", offer(first, *names)).json()
        assert [score["Host"] for score in scores if score["Score"] == 10] == ["shared"]
        return passed(server, second, "shared", "large")

    eventually(lambda: one_after_the_other() == ["large"])
    assert bind(server, first, "shared") == ""
    assert passed(server, second, "shared", "large") == ["large"]


def test_a_pod_that_requests_no_gpu_passes_on_every_node(server: Server) -> None:
    assert passed(server, pod("first", "16Gi"), "shared") == ["shared"]
    assert passed(server, pod("plain", gpus=0), "shared", "unknown-node") == [
        "shared",
        "unknown-node",
    ]


def test_whole_nodes_that_pass_are_returned_unchanged(server: Server) -> None:
    nodes = [{"metadata": {"name": name, "labels": {"n": name}}} for name in ("large", "shared")]
    args = {"Pod": pod("whole-nodes", "40Gi"), "Nodes": {"items": nodes}, "NodeNames": None}
    answer = server.post("/filter", args).json()
    assert answer["Nodes"] == {"items": [nodes[0]]}
    assert answer["FailedAndUnresolvableNodes"] == {
        "shared": "insufficient GPU memory on any device"
    }


def template(name: str, **labels: str) -> dict[str, Any]:
    """Return an autoscaler's template for a node with two L4 GPUs, each of which four pods can
    share.
    """
    written = {
        "count": "2",
        "replicas": "4",
        "memory": "23034",
        "product": "NVIDIA-L4-SHARED",
        "sharing-strategy": "time-slicing",
        **labels,
    }
    return {
        "metadata": {
            "name": name,
            "labels": {f"nvidia.com/gpu.{key}": value for key, value in written.items()},
        },
        "status": {"capacity": {"nvidia.com/gpu": "8"}, "allocatable": {"nvidia.com/gpu": "8"}},
    }


def filtered(server: Server, shown: dict[str, Any], *nodes: dict[str, Any]) -> dict[str, Any]:
    args = {"Pod": shown, "Nodes": {"items": list(nodes)}, "NodeNames": None}
    answer = server.post("/filter", args).json()
    assert answer["Error"] == ""
    assert answer["NodeNames"] is None
    return {
        **{node["metadata"]["name"]: "" for node in answer["Nodes"]["items"]},
        **answer["FailedAndUnresolvableNodes"],
    }


def test_an_autoscalers_template_counts_as_a_new_empty_node(server: Server) -> None:
    plain, reserving, capacity_only = template("plain"), template("reserving"), template("capacity")
    reserving["metadata"]["annotations"] = {"headroom.gpu/reserve": "10Gi"}
    del capacity_only["status"]["allocatable"]
    contradictory = template("contradictory", count="3")
    without_gpu = {"metadata": {"name": "cpu"}, "status": {"allocatable": {"cpu": "8"}}}
    too_little = "no GPU report from the node, and its labels describe its GPUs incompletely"
    nodes = plain, reserving, capacity_only, contradictory, without_gpu
    assert filtered(server, pod("fits", "16Gi"), *nodes) == {
        "plain": "",
        "reserving": "insufficient GPU memory on any device",
        "capacity": "",
        "contradictory": too_little,
        "cpu": too_little,
    }
    larger = filtered(server, pod("large", "22Gi"), plain)
    assert larger == {"plain": "insufficient GPU memory on any device"}


def test_a_template_is_not_recorded(server: Server) -> None:
    shown = pod("imagined", "16Gi")
    args = {"Pod": shown, "Nodes": {"items": [template("new")]}, "NodeNames": None}
    for _ in range(2):  # The first call does not hold memory against the second call.
        assert filtered(server, shown, template("new")) == {"new": ""}
    assert server.post("/prioritize", args).json() == []
    assert server.get("/v1/decisions").json()["decisions"] == []
    assert passed(server, shown, "new", "shared") == ["shared"]  # The name is still unknown.


def test_a_template_is_accepted_together_with_known_nodes(server: Server) -> None:
    known, first = {"metadata": {"name": "shared"}}, pod("first", "20Gi")
    assert filtered(server, first, known) == {"shared": ""}
    assert bind(server, first, "shared") == ""
    answers = filtered(server, pod("second", "8Gi"), known, template("new"))
    assert answers == {"shared": "insufficient GPU memory on any device", "new": ""}
    (decision,) = server.get("/v1/decisions?pod=default/second").json()["decisions"]
    assert (decision["node"], decision["filter"]["fits"]) == (None, 1)
    ranked = server.post("/prioritize", {"Pod": first, "Nodes": {"items": [template("new")]}})
    assert ranked.json() == []


def test_an_unreadable_template_stays_unknown(server: Server) -> None:
    unreadable = {"metadata": {"name": "odd", "labels": {"nvidia.com/gpu.count": 4}}}
    answers = filtered(server, pod("any", "8Gi"), unreadable, template("new"))
    assert answers == {"odd": "node is not known to Headroom", "new": ""}


def test_concurrent_binds_never_reserve_more_memory_than_a_device_has(server: Server) -> None:
    pods = [pod(f"burst-{i}", "10Gi") for i in range(24)]
    for shown in pods:
        assert passed(server, shown, "large", "pair")  # Nothing is reserved yet.
    with ThreadPoolExecutor(24) as pool:
        errors = list(pool.map(lambda shown: bind(server, shown, "large"), pods))
    assert errors.count("") == 4  # There is memory for 8 pods, but the plugin has 4 replicas.
    (device,) = devices(server, "large")
    assert device["pods_unconfirmed_bytes"] == 40 * GI


def test_only_the_best_node_gets_the_maximum_score(server: Server) -> None:
    scores = server.post("/prioritize", offer(pod("p", "20Gi"), "large", "shared", "pair")).json()
    assert scores == [{"Host": "shared", "Score": 10}]


def test_a_node_on_which_the_pod_does_not_fit_has_no_score(server: Server) -> None:
    scores = server.post("/prioritize", offer(pod("p", "60Gi"), "large", "shared", "gone")).json()
    assert scores == [{"Host": "large", "Score": 10}]


def test_a_pod_without_a_gpu_prefers_full_nodes_and_is_not_recorded(
    server: Server,
) -> None:
    holder, plain = pod("holder", "30Gi"), pod("plain", gpus=0)
    everywhere = ("large", "unknown-node", "shared", "pair", "whole")

    def result(*names: str) -> list[dict[str, Any]]:
        return list(server.post("/prioritize", offer(plain, *names)).json())

    assert result(*everywhere) == [{"Host": "shared", "Score": 10}]
    assert result("unknown-node", "large") == [{"Host": "large", "Score": 10}]
    assert result("unknown-node", "or-that") == []
    passed(server, holder, "large")
    # Node large then has 50 of 80 GiB free, and node pair has 48 GiB free.
    assert bind(server, holder, "large") == ""
    assert result("large", "pair", "whole") == [{"Host": "pair", "Score": 10}]
    before = {name: devices(server, name) for name in ("shared", "pair")}
    # Headroom does not manage this pod, so it expects no bind and records no decision.
    assert passed(server, pod("next", "24Gi"), "shared") == ["shared"]
    assert server.get("/v1/explain?pod=default/plain").status == 404
    # Memory is held for the pod that filter passed, until its bind is no longer expected.
    eventually(lambda: before == {name: devices(server, name) for name in ("shared", "pair")})


def test_a_pod_that_could_get_either_device_is_charged_on_both(server: Server) -> None:
    shown = pod("somewhere", "16Gi")
    assert passed(server, shown, "pair")
    assert bind(server, shown, "pair") == ""
    assert [device["headroom_bytes"] for device in devices(server, "pair")] == [8 * GI, 8 * GI]
    # The plugin gives the next pod the other device. If a third pod is admitted first, both pods
    # get the remaining device.
    shown = pod("next", "16Gi")
    assert passed(server, shown, "pair")
    assert bind(server, shown, "pair") == ""
    assert [device["headroom_bytes"] for device in devices(server, "pair")] == [8 * GI, 8 * GI]
    assert passed(server, pod("third", "1M"), "pair") == []


def test_a_report_confirms_the_device_of_the_pod(server: Server) -> None:
    shown = pod("seen", "16Gi")
    passed(server, shown, "pair")
    bind(server, shown, "pair")
    reported = [
        {"uuid": f"GPU-pair-{i}", "index": i, "memory": 24 * GI, "reserved": 0,
         "used": 4 * GI * (i == 1), "unattributed": 0, "sharing": "time-slicing",
         "resource": "nvidia.com/gpu", "replicas": {"free": 4 - (i == 1), "allocated": int(i == 1)}}
        for i in range(2)
    ]  # fmt: skip
    uses = [{"uid": "uid-seen", "device": "GPU-pair-1", "container": "main", "used": 4 * GI}]
    status = {"observedAt": "2026-11-21T00:00:00Z", "devices": reported, "pods": uses}
    reply = server.debug_post("/embedded/v1/reports", [{"node": "pair", "status": status}])
    assert reply.status == 204
    assert [device["headroom_bytes"] for device in devices(server, "pair")] == [24 * GI, 8 * GI]
    # The plugin could still choose the fuller device.
    assert passed(server, pod("wide", "16Gi"), "pair") == []
    assert passed(server, pod("narrow", "8Gi"), "pair") == ["pair"]


def test_a_contradictory_report_makes_its_device_unhealthy_with_a_reason(server: Server) -> None:
    def device(uuid: str, **wrong: object) -> dict[str, object]:
        right = {"uuid": uuid, "memory": 40 * GI, "reserved": 0, "used": 0, "unattributed": 0,
                 "resource": "nvidia.com/gpu", "replicas": {"free": 1}}  # fmt: skip
        return right | wrong

    status = {
        "observedAt": "2026-11-21T00:00:01Z",
        "devices": [
            device("GPU-ok", resource="nvidia.com/gpu.shared"),
            device("GPU-odd", used=41 * GI),
        ],
    }
    server.debug_post("/embedded/v1/reports", [{"node": "whole", "status": status}])
    fine, odd = devices(server, "whole")
    assert (fine["unhealthy"], fine["headroom_bytes"]) == (None, 40 * GI)
    assert odd["unhealthy"] == "contradictory_report"
    assert odd["unhealthy_detail"] == "used is 41.0 GiB, and at most 40.0 GiB is possible"
    shared = pod("p", "8Gi", resource="nvidia.com/gpu.shared")
    assert passed(server, shared, "whole") == ["whole"]
    answer = server.post("/filter", offer(pod("q", "8Gi"), "whole")).json()
    assert answer["FailedAndUnresolvableNodes"] == {
        "whole": "report of a GPU that the pod could get contradicts itself"
    }


def test_a_pod_without_an_annotation_requests_its_replicas_share(server: Server) -> None:
    shown = pod("plain")
    assert passed(server, shown, "shared", "whole") == ["shared", "whole"]
    bind(server, shown, "shared")
    assert devices(server, "shared")[0]["pods_unconfirmed_bytes"] == 6 * GI


def test_the_namespace_default_applies_to_pods_without_an_annotation(server: Server) -> None:
    shown = pod("plain", namespace="team")
    passed(server, shown, "large")
    bind(server, shown, "large")
    assert devices(server, "large")[0]["pods_unconfirmed_bytes"] == 6 * GI


def test_pods_without_gpus_pass_on_all_nodes_and_are_bound_without_a_reservation(
    server: Server,
) -> None:
    shown = pod("web", resource="cpu")
    assert passed(server, shown, "shared", "nowhere") == ["shared", "nowhere"]
    assert bind(server, shown, "shared") == ""
    assert devices(server, "shared")[0]["holders"] == []


def test_an_ended_pod_frees_its_reservation(server: Server) -> None:
    shown = pod("short", "20Gi")
    passed(server, shown, "shared")
    bind(server, shown, "shared")
    assert server.delete("/embedded/v1/pods/default/short").status == 204
    eventually(lambda: passed(server, pod("next", "20Gi"), "shared") == ["shared"])


def test_placement_is_written_on_the_pod_with_its_binding(server: Server) -> None:
    shown = pod("placed", "25%")
    passed(server, shown, "shared")
    bind(server, shown, "shared")
    explained = server.get("/v1/explain?pod=default/placed").json()
    placement = json.loads(explained["annotations"]["headroom.gpu/placement"])
    assert placement == {
        "node": "shared",
        "decision": "uid-placed.1",
        "asked": "25%",
        "containers": {
            "main": {
                "resource": "nvidia.com/gpu",
                "count": 1,
                "bytes": {"GPU-shared-0": 6 * GI},
                "devices": ["GPU-shared-0"],
            }
        },
    }
    assert explained["annotations"]["headroom.gpu/bytes.0"] == str(6 * GI)
    assert explained["annotations"]["headroom.gpu/fraction.0"] == "0.2500"
    assert explained["annotations"]["headroom.gpu/devices.0"] == "GPU-shared-0"


def important(name: str, vram: str, priority: int = 5) -> dict[str, Any]:
    shown = pod(name, vram)
    shown["spec"]["priority"] = priority
    return shown


def victims(*uids: str) -> dict[str, object]:
    return {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": 0}


def preempted(server: Server, shown: dict[str, Any], **offered: object) -> dict[str, list[str]]:
    args = {"Pod": shown, "NodeNameToVictims": None, "NodeNameToMetaVictims": offered}
    answer = server.post("/preempt", args).json()["NodeNameToMetaVictims"]
    return {node: [pod["UID"] for pod in each["Pods"]] for node, each in answer.items()}


def test_preempt_keeps_only_nodes_that_the_victims_would_free(server: Server) -> None:
    holder = pod("holder", "20Gi")
    passed(server, holder, "shared")
    bind(server, holder, "shared")
    shown = important("important", "22Gi")
    offered = {"shared": victims("uid-holder"), "pair": victims("uid-other")}
    assert preempted(server, shown, **offered).keys() == {"shared"}
    assert preempted(server, shown, pair=victims("uid-other")) == {"pair": ["uid-other"]}
    # The victim that kube-scheduler proposed does not help, so a victim that helps is added.
    assert preempted(server, shown, shared=victims("uid-other"), gone=victims("x")) == {
        "shared": ["uid-holder", "uid-other"]
    }
    assert preempted(server, important("as-important", "22Gi", 0), **offered) == {
        "pair": ["uid-other"]
    }
    assert preempted(server, important("large", "90Gi"), **offered) == {}
    # Victims can also be sent as complete pods. The response has UIDs.
    whole = {"shared": {"Pods": [holder], "NumPDBViolations": 0}}
    args = {"Pod": important("another", "22Gi", 6), "NodeNameToVictims": whole}
    assert server.post("/preempt", args).json() == {
        "NodeNameToMetaVictims": {
            "shared": {"Pods": [{"UID": "uid-holder"}], "NumPDBViolations": 0}
        }
    }
