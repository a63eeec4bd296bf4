"""Checks that a real kube-scheduler binds a pending pod after any of its suggestions is followed.

The clusters are random, but use only what Headroom models: labels, taints, cordons, selectors,
affinity, tolerations, scheduling gates, schedulers, unhealthy GPUs, and GPUs that are full of other
pods.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from headroom.contract.annotations import VRAM
from tests.controlplane import SCHEDULER_NAME, ApiRefused
from tests.e2e.cluster import PODS, PlayedCluster, pod_manifest, quota_controller
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import RESOURCE, Shape, node_status
from tests.loopback import LOOPBACK

#: Seeds of the tested clusters. Of the first 40 seeds, these lead to a suggestion that no other
#: seed covers. TEST_FOLLOWING_EXAMPLES sets a number of seeds, and the test then uses all seeds
#: from 0 on.
SEEDS: Sequence[int] = (0, 2, 3, 5, 7, 9, 16, 18, 19, 20, 22, 27, 30, 31, 32, 34, 35)
if "TEST_FOLLOWING_EXAMPLES" in os.environ:
    SEEDS = range(int(os.environ["TEST_FOLLOWING_EXAMPLES"]))
#: Seeds of the clusters in which memory is held for nominated pods.
HELD_SEEDS = (1, 3, 7)
SHAPE = Shape(replicas=3)
MERGE = "application/merge-patch+json"
ZONES, TEAMS = ("a", "b"), ("x", "y")
WAITS = "waits"
STALE_AFTER_S = 15.0
#: Maximum number of steps in one example, because a gate, a scheduler and a suggestion can follow
#: each other.
MOST_STEPS = 4
EVERYWHERE = [{"operator": "Exists"}]


@pytest.fixture
def cluster(new_cluster: NewCluster) -> PlayedCluster:
    cluster = new_cluster(4, SHAPE)
    cluster.bring_up()
    return cluster


def test_following_any_suggestion_binds_the_pod(cluster: PlayedCluster, tell: Tell) -> None:
    followed = follow_suggestions(cluster, SEEDS, held=False)
    tell(f"suggestions followed on {len(SEEDS)} random clusters: {dict(followed)}")
    assert {"lower", "wait", "eligible", "repair"} <= followed.keys()


def test_following_any_suggestion_binds_the_pod_next_to_held_memory(
    new_cluster: NewCluster, tell: Tell
) -> None:
    """On most nodes, memory is held for a nominated pod."""
    cluster = new_cluster(4, SHAPE)
    cluster.start_scheduler(cluster.start_extender(settings={"nomination_hold_s": 3600.0}))
    cluster.settle()
    followed = follow_suggestions(cluster, HELD_SEEDS, held=True)
    tell(f"suggestions followed beside held memory: {dict(followed)}")
    assert "lower" in followed


def follow_suggestions(cluster: PlayedCluster, seeds: Sequence[int], held: bool) -> Counter[str]:
    """Follow suggestions in random clusters. Return how often each kind of suggestion was
    followed.
    """
    followed: Counter[str] = Counter()
    for seed in seeds:
        random = Random(seed)
        change_nodes(cluster, random)
        fill(cluster, random)
        if held:
            hold_some(cluster, random)
        break_some(cluster, random)
        cluster.create_pod(WAITS, f"{random.choice((2, 14, 20, 20, 24, 26))}Gi", **wishes(random))
        for _ in range(MOST_STEPS):
            body = once_tried(cluster)
            if not body:
                break
            step = follow(cluster, body, random)
            followed[step] += 1
            if step == "nothing to suggest":
                break
            if step in ("gate", "scheduler"):
                continue
            cluster.until(
                lambda: bool(cluster.node_of(WAITS)),
                f"seed {seed}: bound after {step}: {body['suggestions']}",
            )
        clean(cluster)
    return followed


def hold_some(cluster: PlayedCluster, random: Random) -> None:
    """Nominate pods to nodes with a free replica, as after a preemption. Wait until the extender
    counts the nominations.
    """
    wanted = {}
    taken = Counter(pod["spec"]["nodeName"] for pod in cluster.bound())
    for name in cluster.names:
        if random.random() < 0.8 and taken[name] < SHAPE.replicas:
            held = f"held-{name}"
            cluster.create_pod(held, f"{random.choice((2, 8, 14))}Gi", schedulerName="not-running")
            nominated = {"status": {"nominatedNodeName": name}}
            cluster.plane.call("PATCH", f"{PODS}/{held}/status", nominated, MERGE)
            wanted[name] = held

    def seen() -> bool:
        """Return whether each node shows its nominated pod. Other pods on the node may also be
        unconfirmed.
        """
        devices = (ask(cluster, f"/v1/nodes/{name}")["node"]["devices"][0] for name in wanted)
        return all(
            held in {holder["name"] for holder in device["holders"]}
            for held, device in zip(wanted.values(), devices, strict=True)
        )

    cluster.until(seen, "the extender holds the memory")


def change_nodes(cluster: PlayedCluster, random: Random) -> None:
    """Change labels, taints and cordons. Wait until the extender has received the changes."""
    wanted = {}
    for name in cluster.names:
        team = random.choice((None, None, *TEAMS))
        taints = [{"key": "team", "value": team, "effect": "NoSchedule"}] if team else []
        cordon = random.random() < 0.2
        labels = {"zone": random.choice(ZONES), "gpus": str(random.choice((1, 8)))}
        changed = {
            "metadata": {"labels": labels},
            "spec": {"taints": taints, "unschedulable": cordon},
        }
        cluster.plane.call("PATCH", f"/api/v1/nodes/{name}", changed, MERGE)
        wanted[name] = cordon, [f"team={team}:NoSchedule"] if team else []

    def seen() -> bool:
        nodes = ask(cluster, "/v1/nodes")["nodes"]
        return {each["name"]: (each["cordoned"], each["taints"]) for each in nodes} == wanted

    cluster.until(seen, "the extender has seen the nodes as they are now")


def fill(cluster: PlayedCluster, random: Random) -> None:
    """Bind pods to some nodes with the same scheduler. The pods tolerate all taints."""
    names = []
    for node in cluster.names:
        for number in range(random.choice((0, 1, 2, 3, 3))):
            names.append(f"{node}-{number}")
            cluster.create_pod(
                names[-1],
                f"{random.choice((1, 4, 7))}Gi",
                nodeSelector={"kubernetes.io/hostname": node},
                tolerations=EVERYWHERE,
            )
    cluster.until(
        lambda: {pod["metadata"]["name"] for pod in cluster.bound()} >= set(names),
        "the pods that fill the nodes are bound",
    )
    cluster.nodes.observe(cluster.pods())


def break_some(cluster: PlayedCluster, random: Random) -> None:
    """Make the GPUs of some nodes unhealthy. Wait until the extender has received the reports."""
    cluster.nodes.sick = {name for name in cluster.names if random.random() < 0.2}
    report_health(cluster)


def report_health(cluster: PlayedCluster) -> None:
    cluster.nodes.report(cluster.names)

    def seen() -> bool:
        nodes = ask(cluster, "/v1/nodes")["nodes"]
        sick = {n["name"] for n in nodes if any(d["unhealthy"] for d in n["devices"])}
        return sick == cluster.nodes.sick

    cluster.until(seen, "the extender has seen which GPUs are healthy")


def wishes(random: Random) -> dict[str, Any]:
    """Return a random pod spec that restricts the nodes of the pod, and the schedulers that may try
    it.
    """
    spec: dict[str, Any] = {}
    if random.random() < 0.4:
        spec["nodeSelector"] = {"zone": random.choice(ZONES)}
    if random.random() < 0.3:
        more_than = {"key": "gpus", "operator": random.choice(("Gt", "Lt")), "values": ["4"]}
        required = {"nodeSelectorTerms": [{"matchExpressions": [more_than]}]}
        kind = "requiredDuringSchedulingIgnoredDuringExecution"
        spec["affinity"] = {"nodeAffinity": {kind: required}}
    if random.random() < 0.3:
        value = random.choice(TEAMS)
        spec["tolerations"] = [{"key": "team", "operator": "Equal", "value": value}]
    if random.random() < 0.15:
        spec["schedulingGates"] = [{"name": "test.headroom.gpu/later"}]
    if random.random() < 0.15:
        spec["schedulerName"] = "nobody"
    return spec


def once_tried(cluster: PlayedCluster) -> Mapping[str, Any]:
    """Wait until the scheduler has tried the pod. Return its explanation, or an empty object if the
    pod is bound.
    """
    pod = cluster.pod(WAITS)
    gated = bool(pod["spec"].get("schedulingGates"))
    if not gated and pod["spec"]["schedulerName"] == SCHEDULER_NAME:
        cluster.until(
            lambda: bool(
                cluster.node_of(WAITS) or "nodes are available" in cluster.rejection(WAITS)
            ),
            "the pod is tried",
        )
    body: dict[str, Any] = {}

    def decided() -> bool:
        """Return whether the pod is bound or has an explanation. If the headline reports that the
        pod fits, it must be bound.
        """
        nonlocal body
        if cluster.node_of(WAITS):
            body = {}
            return True
        answer = LOOPBACK.get(f"{cluster.debug_url()}/v1/explain?pod=e2e/{WAITS}")
        if answer.status_code == 404:
            return False  # The extender's watch has not delivered the pod yet.
        body = answer.raise_for_status().json()
        # The extender may still have an earlier pod with this name.
        current = body["uid"] == pod["metadata"]["uid"] and gated == (body["verdict"] == "gated")
        return current and body["verdict"] not in ("fits", "bound")

    cluster.until(decided, "the pod is bound, or a reason is given why not")
    return body


def follow(cluster: PlayedCluster, body: Mapping[str, Any], random: Random) -> str:
    """Follow a suggestion. Return its text."""
    if body["verdict"] == "gated":
        path = f"{PODS}/{WAITS}"
        cluster.plane.call("PATCH", path, {"spec": {"schedulingGates": None}}, MERGE)
        return "gate"
    if body["verdict"] == "other_scheduler":
        named = body["message"].rpartition("spec.schedulerName: ")[2]
        assert named == SCHEDULER_NAME
        again(cluster, schedulerName=named)
        return "scheduler"
    assert body["verdict"] == "rejected", body["message"]
    if not body["advice"]:
        return "nothing to suggest"
    one = random.choice(body["advice"])
    match one["kind"]:
        case "lower":
            again(cluster, vram=str(one["lower_to_bytes"]))
        case "wait":
            cluster.delete_pod(one["wait_for"]["name"])
            cluster.nodes.observe(cluster.pods())
        case "replicas":
            give_replicas(cluster, SHAPE.replicas + 1)
        case "eligible":
            become_eligible(cluster, body, one)
        case "repair":
            cluster.nodes.sick.remove(one["node"])
            cluster.nodes.report([one["node"]])
        case kind:
            raise AssertionError(f"{kind}: {one['sentence']}")
    return str(one["kind"])


def become_eligible(
    cluster: PlayedCluster, body: Mapping[str, Any], one: Mapping[str, Any]
) -> None:
    what = one["sentence"].partition(":")[0]
    match what:
        case "uncordon":
            for name in [one["node"]] if one["node"] else cluster.names:
                path = f"/api/v1/nodes/{name}"
                cluster.plane.call("PATCH", path, {"spec": {"unschedulable": False}}, MERGE)
        case _ if what.startswith("add a toleration for taint team="):
            value = "x" if "taint team=x:NoSchedule" in one["sentence"] else "y"
            had = cluster.pod(WAITS)["spec"].get("tolerations", [])
            again(cluster, tolerations=[*had, {"key": "team", "value": value}])
        case "change the required node affinity":
            again(cluster, affinity=None)
        case _:
            assert what.startswith("change nodeSelector zone="), what
            other = "b" if what.endswith("a") else "a"
            again(cluster, nodeSelector={"zone": other})


def again(cluster: PlayedCluster, vram: str | None = None, **spec: Any) -> None:
    """Create the pod again with these changes."""
    was = cluster.pod(WAITS)
    cluster.delete_by_force(WAITS)
    manifest = pod_manifest(vram or was["metadata"]["annotations"][VRAM])
    manifest["metadata"]["name"] = WAITS
    kept = ("nodeSelector", "affinity", "tolerations", "schedulerName", "schedulingGates")
    manifest["spec"] |= {key: was["spec"][key] for key in kept if key in was["spec"]} | spec
    cluster.plane.call("POST", PODS, manifest)


def give_replicas(cluster: PlayedCluster, replicas: int) -> None:
    """Increase the number of replicas, as device plugins do after a change of their configuration,
    and report it.
    """
    cluster.nodes.shape = replace(SHAPE, replicas=replicas)
    for name in cluster.names:
        path = f"/api/v1/nodes/{name}/status"
        cluster.plane.call("PATCH", path, node_status(cluster.nodes.shape), MERGE)
    cluster.nodes.report(cluster.names)


def clean(cluster: PlayedCluster) -> None:
    for pod in cluster.pods():
        cluster.delete_pod(pod["metadata"]["name"])
    cluster.nodes.observe([])
    cluster.until(
        lambda: not any(each.spec.reservations for each in cluster.gpunodes()),
        "the pods have left the ledgers",
    )
    if cluster.nodes.shape != SHAPE:
        give_replicas(cluster, SHAPE.replicas)
    cluster.nodes.sick = set()
    report_health(cluster)


def what_if(cluster: PlayedCluster, asked: Mapping[str, Any]) -> Any:
    url = f"{cluster.debug_url()}/v1/whatif"
    return LOOPBACK.post(url, json=asked).raise_for_status().json()


def ask(cluster: PlayedCluster, path: str) -> Any:
    return LOOPBACK.get(f"{cluster.debug_url()}{path}").raise_for_status().json()


def test_a_pod_is_bound_when_the_agent_of_a_suggested_node_reports_again(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1)
    url = cluster.start_extender(settings={"stale_after_s": STALE_AFTER_S})
    cluster.start_scheduler(url)
    cluster.settle()
    (name,) = cluster.names

    def stale() -> bool:
        (node,) = ask(cluster, "/v1/nodes")["nodes"]
        return not node["fresh"]

    cluster.until(stale, "the report is stale")
    cluster.create_pod(WAITS, "10Gi")
    body = once_tried(cluster)
    (one,) = body["advice"]
    assert (one["kind"], one["node"]) == ("repair", name)
    cluster.nodes.report([name])

    def bound() -> bool:
        cluster.nodes.beat([name])  # The agent starts to report again.
        return bool(cluster.node_of(WAITS))

    cluster.until(bound, one["sentence"])


def test_no_suggestion_exceeds_the_quota_of_the_api_server(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1)
    cluster.bring_up()
    for name in ("one", "two"):
        cluster.create_pod(name, "9Gi")
    cluster.until(lambda: len(cluster.bound()) == 2, "two pods fill the GPU")
    cluster.create_pod(WAITS, "10Gi")
    assert once_tried(cluster)["advice"][-1]["kind"] == "lower"

    path, counted = "/api/v1/namespaces/e2e/resourcequotas", f"requests.{RESOURCE}"
    lowered = pod_manifest("4Gi")
    lowered["metadata"]["name"] = "lowered"

    def status() -> Any:
        return cluster.plane.call("GET", f"{path}/team").get("status")

    def rejection() -> str:
        """Return why the quota rejects the lower request. Return an empty string if the API server
        accepts it.

        The result can change, because the API server follows the quota's status with a separate
        watch.
        """
        try:
            cluster.plane.call("POST", f"{PODS}?dryRun=All", lowered)
        except ApiRefused as err:
            return str(err)
        return ""

    spec = {"hard": {counted: "2"}}
    with contextlib.ExitStack() as undo:
        # Recount soon instead of after 5 minutes, because the controller may not have received all
        # three pods yet.
        undo.enter_context(quota_controller(cluster.plane, "--resource-quota-sync-period=5s"))
        cluster.plane.call("POST", path, {"metadata": {"name": "team"}, "spec": spec})
        undo.callback(cluster.plane.call, "DELETE", f"{path}/team")
        cluster.until(
            lambda: status() == {**spec, "used": {counted: "3"}}, "all three pods are counted"
        )
        # The earlier suggestion would now lead to the loss of the pod.
        cluster.until(lambda: "exceeded quota: team" in rejection(), "the quota is enforced")
        body = ask(cluster, f"/v1/explain?pod=e2e/{WAITS}")
        assert {one["kind"] for one in body["advice"]} == {"wait", "quota"}
        shown = next(one["sentence"] for one in body["advice"] if one["kind"] == "quota")
        assert f"ResourceQuota team is exceeded for {counted}" in shown

        # A what-if of new pods gives the same result as the API server.
        lowered["metadata"]["namespace"] = "e2e"
        asked = {"pods": [{"manifest": lowered}], "release": ["e2e/one"]}
        (rejected,) = what_if(cluster, asked)["rejections"]
        why = f"ResourceQuota team would reject it for {counted}"
        assert rejected["not_tried"] == why
        more = {"hard": {counted: "3"}}
        cluster.plane.call("PATCH", f"{path}/team", {"spec": more}, MERGE)
        cluster.until(
            lambda: status() == {**more, "used": {counted: "3"}}, "the new quota is counted"
        )
        assert what_if(cluster, asked)["placed"] == 1
        cluster.delete_pod("one")
        cluster.until(lambda: rejection() == "", "the pod has left the quota")
