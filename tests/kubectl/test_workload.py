"""Tests `kubectl headroom why deploy/NAME`, for authors who know only the workload."""

from pathlib import Path
from typing import Any, cast

import pytest

from headroom.contract.watched import PodSeen
from headroom.kubectl.cluster_changes import Cluster, Created
from headroom.kubectl.debug_api_client import (
    UNREACHABLE,
    CommandError,
    DebugApi,
    NotPermitted,
)
from headroom.kubectl.options import Options
from headroom.kubectl.why import why
from headroom.kubectl.workload import explain_workload, pod_key, workload_of
from tests.builders import pod
from tests.console.asking import Asked
from tests.console.explained import node, owned
from tests.kubectl.fake_cluster import serving_fake


class Api:
    """Calls the debug API in this process."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def get(self, *path: str, **query: str | int) -> Any:
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        answer = self._asked.get(f"/v1/{'/'.join(path)}?{asked}")
        assert answer.status_code == 200, answer.text
        return answer.json()


def not_listed(namespace: str, kind: str, name: str) -> list[Created]:
    raise AssertionError("the API server was asked although the debug API answers")


class OnlyPods(Api):
    """Calls the debug API for an author who may get pods, but not a view of all pods."""

    def get(self, *path: str, **query: str | int) -> Any:
        if path == ("pods",):
            raise NotPermitted("author may not get path /v1/pods", UNREACHABLE)
        return super().get(*path, **query)


def explained(asked: Asked, written: str) -> tuple[list[str], list[str]]:
    """Return the list of pods, and the explanation of one pod."""
    found = workload_of(written)
    assert found is not None
    lines, bodies = explain_workload(cast(DebugApi, Api(asked)), "default", *found, not_listed)
    return lines, [line for body in bodies for line in why(body)]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("deploy/d2", ("Deployment", "d2")),
        ("deployments/d2", ("Deployment", "d2")),
        ("deployments.apps/d2", ("Deployment", "d2")),
        ("Job/train", ("Job", "train")),
        ("sts/llm", ("StatefulSet", "llm")),
        ("rs/d2-5f7", ("ReplicaSet", "d2-5f7")),
        ("ds/agent", ("DaemonSet", "agent")),
        ("cj/nightly", ("CronJob", "nightly")),
        ("cronjobs.batch/nightly", ("CronJob", "nightly")),
        ("d2", None),
        ("ml/d2", None),
        ("pod/d2", None),
        ("deploy/", None),
    ],
)
def test_a_workload_is_written_as_in_kubectl(written: str, found: tuple[str, str] | None) -> None:
    assert workload_of(written) == found


def test_why_of_a_deployment_lists_its_pods_and_explains_one_that_waits() -> None:
    asked = Asked()
    asked.writer.apply(node("a", full=20))
    for name, on in (("d2-5f7-a", "a"), ("d2-5f7-b", None), ("d2-5f7-c", None)):
        made = pod("8Gi", uid=name, name=name, node=on)
        asked.writer.apply([PodSeen(owned(made, "ReplicaSet", "d2-5f7", pod_template_hash="5f7"))])
    lines, explanation = explained(asked, "deploy/d2")
    assert lines == [
        "Deployment default/d2: 3 pods",
        "  d2-5f7-a: unconfirmed, unreserved on node a",
        "  d2-5f7-b: waiting",
        "  d2-5f7-c: waiting",
    ]
    assert explanation[0] == "Pod default/d2-5f7-b: no node can take the pod"


@pytest.mark.parametrize(
    ("written", "kind", "owner", "name"),
    [
        ("cj/nightly", "Job", "nightly-29405820", "nightly-29405820-x7k2p"),
        ("job/nightly-29405820", "Job", "nightly-29405820", "nightly-29405820-x7k2p"),
        ("rs/d2-5f7", "ReplicaSet", "d2-5f7", "d2-5f7-x7k2p"),
        ("deploy/d2", "ReplicaSet", "d2-5f7", "d2-5f7-x7k2p"),
        ("sts/llm", "StatefulSet", "llm", "llm-0"),
        ("ds/agent", "DaemonSet", "agent", "agent-x7k2p"),
    ],
)
def test_every_kind_of_workload_finds_its_pods(
    written: str, kind: str, owner: str, name: str
) -> None:
    asked = Asked()
    asked.writer.apply(node("a", full=20))
    made = pod("8Gi", uid="u", name=name)
    other = pod("8Gi", uid="v", name="other-5f7-x7k2p")
    asked.writer.apply(
        [
            PodSeen(owned(made, kind, owner, pod_template_hash="5f7")),
            PodSeen(owned(other, kind, "other-29405820", pod_template_hash="5f7")),
        ]
    )
    lines, _ = explained(asked, written)
    assert lines[1:] == [f"  {name}: waiting"]
    options = Options(None, None, None, None, None, "headroom-system")
    key = pod_key(options, cast(DebugApi, Api(asked)), written, "default")
    assert key == f"default/{name}"


def test_the_pods_of_a_cronjob_are_found_through_its_jobs(tmp_path: Path) -> None:
    owner = {"kind": "Job", "uid": "o", "apiVersion": "batch/v1", "controller": True}
    with serving_fake(tmp_path) as (cluster, kubeconfig):
        for name, job in (("a", "nightly-29405820"), ("b", "nightly-manual"), ("c", "nightly")):
            cluster.add_pod(name, ownerReferences=[owner | {"name": job}])
        found = Cluster(kubeconfig, None).pods_of("team-a", "CronJob", "nightly")
    assert [each.name for each in found] == ["a"]


def test_an_author_without_rights_in_the_cluster_gets_the_pods_from_the_api_server(
    tmp_path: Path,
) -> None:
    asked = Asked()
    asked.writer.apply(node("a", full=20))
    asked.writer.apply([PodSeen(pod("8Gi", uid="u", name="d2-5f7-b"))])
    with serving_fake(tmp_path) as (cluster, kubeconfig):
        hashed = {"labels": {"pod-template-hash": "5f7"}}
        owner = {"kind": "ReplicaSet", "uid": "o", "apiVersion": "apps/v1", "controller": True}
        for name, of in (("d2-5f7-b", "d2-5f7"), ("d2-5f7-a", "d2-5f7"), ("d3-5f7-a", "d3-5f7")):
            cluster.add_pod(name, ownerReferences=[owner | {"name": of}], **hashed)
        cluster.pods["d2-5f7-b"]["spec"]["nodeName"] = None
        api = cast(DebugApi, OnlyPods(asked))
        read = Cluster(kubeconfig, None)

        def listed(namespace: str, kind: str, name: str) -> list[Created]:
            assert namespace == "default"
            return read.pods_of("team-a", kind, name)

        lines, (body,) = explain_workload(api, "default", "Deployment", "d2", listed)
        of_set, _ = explain_workload(api, "default", "ReplicaSet", "d2-5f7", listed)
        assert of_set[1:] == lines[1:]
        with pytest.raises(CommandError, match="Job default/d2 has no pod"):
            explain_workload(api, "default", "Job", "d2", listed)
    assert lines == [
        "Deployment default/d2: 2 pods",
        "  d2-5f7-b: waiting",
        "  d2-5f7-a: on node gpu-a",
    ]
    assert why(body)[0] == "Pod default/d2-5f7-b: no node can take the pod"


def test_a_deployment_without_pods_shows_where_the_rejection_is() -> None:
    with pytest.raises(CommandError) as caught:
        explained(Asked(), "deploy/d2")
    assert str(caught.value) == (
        "Deployment default/d2 has no pod that requests a GPU. If it exists, the API server may "
        "have rejected its pods when they were created: kubectl -n default get events "
        "--field-selector reason=FailedCreate"
    )
