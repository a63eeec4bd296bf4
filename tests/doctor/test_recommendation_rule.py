"""Tests the doctor's findings about requests that differ from their recommendations, and about the
recorder.
"""

import msgspec

from headroom.console.responses import stamp
from headroom.contract.kube import Pod
from headroom.contract.watched import NodeSeen, PodSeen
from headroom.doctor.component_pods import ComponentPod
from headroom.doctor.environment import Environment, examine_environment
from headroom.doctor.findings import line
from headroom.doctor.recommendation_rule import examine_recommendations
from headroom.runtime.settings.settings import Settings
from tests.builders import kube_node
from tests.console.asking import WALL_S, Asked
from tests.console.test_recommendations import add_pod, profile
from tests.doctor.test_environment import neighbour

HOUR_S = 3600.0


def bound(asked: Asked, name: str, vram: str, owner: str = "llm", **annotations: str) -> None:
    """Add a pod of a Deployment that was created two hours ago and runs on a node."""
    add_pod(asked, name, vram, owner)
    made = asked.cluster.pod(f"u-{name}")
    assert made is not None
    metadata = msgspec.structs.replace(
        made.metadata,
        creation_timestamp=stamp(WALL_S - 2 * HOUR_S),
        annotations={**(made.metadata.annotations or {}), **annotations},
    )
    spec = msgspec.structs.replace(made.spec, node_name="n")
    newer: Pod = msgspec.structs.replace(made, metadata=metadata, spec=spec)
    asked.writer.apply([NodeSeen(kube_node("n")), PodSeen(newer)])


def found(asked: Asked, *profiles: object) -> list[str]:
    return [
        line(each)
        for each in examine_recommendations(asked.cluster, profiles, WALL_S)  # type: ignore[arg-type]
    ]


def test_requests_of_twice_the_recommendation_are_reported_by_namespace() -> None:
    """The recommendation from five runs that use 8 GiB is 9.65 GiB."""
    asked = Asked()
    bound(asked, "large", "40Gi")
    bound(asked, "larger", "50Gi")
    bound(asked, "near", "12Gi", owner="chat")
    assert found(asked, profile(), profile("chat")) == [
        "advice: Deployment ml/llm: the pods request at least twice what past lives needed: "
        "71.2 GiB more than recommended. To do: kubectl headroom recommend -n ml -o patch prints "
        "the commands that lower the requests."
    ]


def test_requests_near_the_recommendation_or_without_one_give_no_finding() -> None:
    asked = Asked()
    bound(asked, "near", "15Gi")
    bound(asked, "new", "40Gi", owner="chat")
    assert found(asked, profile(), profile("chat", lives=2)) == []


def test_pods_with_auto_whose_owner_has_no_profile_after_an_hour_are_reported() -> None:
    asked = Asked()
    auto = {"headroom.gpu/vram-requested": "auto,default=8Gi"}
    bound(asked, "unseen", "8Gi", owner="chat", **auto)
    bound(asked, "seen", "8Gi", **auto)
    bound(asked, "fixed", "8Gi", owner="other")
    assert found(asked, profile()) == [
        "advice: ml/unseen: these pods request headroom.gpu/vram: auto, and no VRAMProfile has "
        "their owner, so each pod gets its default. To do: check that the agent measures them: "
        "kubectl headroom top pod -A shows their use; and that the recorder runs: "
        "kubectl -n headroom-system logs deployment/headroom-recorder."
    ]
    young = asked.cluster.pod("u-unseen")
    assert young is not None
    metadata = msgspec.structs.replace(young.metadata, creation_timestamp=stamp(WALL_S - 60))
    asked.writer.apply([PodSeen(msgspec.structs.replace(young, metadata=metadata))])
    assert found(asked, profile()) == []


def component(name: str, waits: str = "") -> ComponentPod:
    labels = {"app.kubernetes.io/name": "headroom", "app.kubernetes.io/component": name}
    made = neighbour(name, "n", waits, tag="1.0", labels=labels)
    metadata = msgspec.structs.replace(made.metadata, namespace="headroom-system")
    return msgspec.structs.replace(made, metadata=metadata)


def examined(*pods: ComponentPod) -> list[str]:
    return [line(each) for each in examine_environment(Environment(pods), Settings(), "1.0")]


def test_a_recorder_that_is_not_ready_or_missing_is_reported() -> None:
    rest = (
        "lives of containers that end now are not recorded, so recommended requests become "
        "outdated. To do: run: kubectl -n headroom-system describe deployment,pods "
        "-l app.kubernetes.io/component=recorder."
    )
    assert examined(component("extender")) == [f"advice: no pod of the recorder exists: {rest}"]
    assert examined(component("extender"), component("recorder", "CrashLoopBackOff")) == [
        f"advice: headroom-system/recorder-n: no pod of the recorder is ready: {rest}"
    ]
    assert examined(component("extender"), component("recorder")) == []
    assert examined() == []
