"""The task of an SRE at 3 a.m.: a container ran out of GPU memory, and another pod took it.

One GPU of 24 GiB has three pods: llm reserved 8 GiB, chat 8 GiB and embed 4 GiB. Then llm uses 17.5
GiB, and chat crashes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headroom.console.feed.feed import Feed
from headroom.console.feed.memory_changes import MemoryChanges
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import ContainerState, ContainerStatus, Pod, PodStatus, Terminated
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import TimePassed
from headroom.core.cluster.crowded_pods import crashes_of, crowdings_of
from headroom.core.cluster.notices import notices
from headroom.kubectl.tables import drift
from headroom.kubectl.why import why
from tests.builders import DISTRIBUTED, GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.console.asking import WALL_S, Asked
from tests.console.test_devices import since

DOCS = Path(__file__).parents[2] / "docs"
#: Reserved GiB of the pods.
RESERVED = {"llm": 8, "chat": 8, "embed": 4}
UUID = "GPU-5e8a1b2c-0000-0000-0000-000000000000"


def report(llm: float, chat: float, version: str, rogue: float = 0, process: float = 0) -> GPUNode:
    used = {"llm": llm, "chat": chat, "embed": 2.0}
    rows = [
        use(f"u-{who}", UUID, int(gib * GIB), replica=f"{UUID}::{n}", namespace="ml", name=who)
        for n, (who, gib) in enumerate(used.items())
    ]
    if rogue:
        rows.append(use("u-rogue", UUID, int(rogue * GIB), namespace="other", name="rogue"))
    held = {
        f"u-{who}": msgspec.structs.replace(
            since(reservation({UUID: gib * GIB}, name=who)), namespace="ml"
        )
        for who, gib in RESERVED.items()
    }
    return gpunode(
        shared(
            UUID,
            index=0,
            free=1,
            allocated=3,
            used_bytes=int((sum(used.values()) + rogue + process) * GIB),
            unattributed_bytes=int(process * GIB),
        ),
        name="gpu-a",
        reservations=held,
        pods=rows,
        plugin=DISTRIBUTED,
        version=version,
    )


def running(who: str) -> Pod:
    return pod(
        f"{RESERVED[who]}Gi",
        uid=f"u-{who}",
        name=who,
        namespace="ml",
        node="gpu-a",
        phase="Running",
    )


def crashed(who: Pod, at: str, exit_code: int = 1, restarts: int = 0) -> Pod:
    end = ContainerState(terminated=Terminated(exit_code, "Error", at))
    ended = ContainerStatus("main", last_state=end, restart_count=restarts)
    return msgspec.structs.replace(
        who, status=PodStatus(phase="Running", container_statuses=[ended])
    )


class Incident:
    """The debug API during the incident. Times are in seconds after midnight."""

    def __init__(self) -> None:
        self.asked = Asked()
        self._version = 0
        pods = [PodSeen(running(who)) for who in RESERVED]
        self.asked.writer.apply([NodeSeen(kube_node("gpu-a")), *pods])

    def at(self, now_s: float, llm: float, chat: float, **others: float) -> None:
        """Report the use of llm and chat, of a pod ``rogue`` without a reservation, and of a
        ``process`` of no known pod, in GiB."""
        self._version += 1
        self.asked.now_s = now_s
        gpunode = report(llm, chat, str(self._version), **others)
        self.asked.writer.apply([GPUNodeSeen(gpunode, now_s)])
        self.asked.writer.apply([TimePassed(now_s)])

    def crash(self, at: str, **how: Any) -> None:
        self.asked.writer.apply([PodSeen(crashed(running("chat"), at, **how))])

    def why(self, who: str) -> list[str]:
        answer = self.asked.get(f"/v1/explain?pod=ml/{who}")
        assert answer.status_code == 200, answer.text
        return why(answer.json())


@pytest.fixture
def incident() -> Incident:
    """A quiet minute, then 9.5 GiB of overuse at 00:01:10, and a crash of the victim."""
    found = Incident()
    found.at(0, llm=7, chat=4)
    found.at(70, llm=17.5, chat=4)
    return found


BLAME = "pod ml/llm uses 17.5 GiB, 9.5 GiB more than it reserved"


def test_before_the_overuse_why_reports_no_trouble() -> None:
    quiet = Incident()
    quiet.at(0, llm=7, chat=4)
    assert quiet.why("chat")[0] == "Pod ml/chat: bound to node gpu-a"


def test_why_the_victim_names_who_overcommits_its_gpu_since_when_and_by_how_much(
    incident: Incident,
) -> None:
    lines = incident.why("chat")
    sentence = (
        f"GPU 0 of node gpu-a is overcommitted by 5.5 GiB since 2026-11-21T00:01:10Z: {BLAME}"
    )
    assert lines[0] == f"Pod ml/chat: bound to node gpu-a; {sentence}"
    assert f"  {sentence}" in lines


def test_why_the_victim_states_how_its_container_ended(incident: Incident) -> None:
    incident.crash("2026-11-21T00:01:12Z", restarts=1)
    incident.at(75, llm=17.5, chat=0)
    lines = incident.why("chat")
    assert lines[0] == (
        "Pod ml/chat: bound to node gpu-a; container main ended with exit code 1 (Error) at "
        "2026-11-21T00:01:12Z and was restarted once, while GPU 0 of node gpu-a was overcommitted: "
        f"{BLAME}"
    )
    assert (
        "  container main ended with exit code 1 (Error) at 2026-11-21T00:01:12Z and was restarted "
        "once, while GPU 0 of node gpu-a was overcommitted: CUDA probably reported out of memory, "
        "see the log of the container"
    ) in lines


def test_why_still_explains_the_crash_after_the_overuse_has_ended(incident: Incident) -> None:
    incident.crash("2026-11-21T00:01:12Z")
    incident.at(200, llm=7, chat=0)
    headline, *lines = incident.why("chat")
    assert headline.endswith(
        "while GPU 0 of node gpu-a was overcommitted: pod ml/llm used 17.5 GiB, 9.5 GiB more than "
        "it reserved"
    )
    assert (
        "  GPU 0 of node gpu-a was overcommitted by up to 5.5 GiB from 2026-11-21T00:01:10Z to "
        "2026-11-21T00:03:20Z: pod ml/llm used 17.5 GiB, 9.5 GiB more than it reserved"
    ) in lines


@pytest.mark.parametrize("at", ["2026-11-21T00:00:30Z", "2026-11-21T00:10:00Z"])
def test_a_crash_at_another_time_is_not_attributed_to_the_overuse(
    incident: Incident, at: str
) -> None:
    incident.crash(at)
    incident.at(200, llm=7, chat=4)
    lines = incident.why("chat")
    assert lines[0] == "Pod ml/chat: bound to node gpu-a"
    assert f"  container main ended with exit code 1 (Error) at {at}" in lines


def test_a_reader_does_not_get_the_names_of_pods_that_he_may_not_read(incident: Incident) -> None:
    (crowding,) = crowdings_of(incident.asked.cluster, "u-chat")
    assert "a pod that you may not read uses 17.5 GiB" in crowding.sentence(lambda *_: False)
    assert "llm" not in crowding.sentence(lambda *_: False)


def test_why_the_culprit_says_that_it_is_the_culprit(incident: Incident) -> None:
    lines: Sequence[str] = incident.why("llm")
    assert lines[0] == "Pod ml/llm: bound to node gpu-a, and uses more memory than it reserved"
    assert any("this pod uses 17.5 GiB, 9.5 GiB more than it reserved" in each for each in lines)


def test_the_guide_shows_what_why_prints(incident: Incident) -> None:
    incident.crash("2026-11-21T00:01:12Z", restarts=1)
    incident.at(75, llm=17.5, chat=0)
    printed = incident.why("chat")
    page = (DOCS / "operate/cuda-out-of-memory.md").read_text()
    shown = page.split("$ kubectl headroom why chat -n ml\n")[1].split("```")[0].splitlines()
    assert len([each for each in shown if each.strip() != "..."]) == 2
    for line in shown:
        assert line in printed or line.strip() == "..."
    assert "CUDA out of memory. Tried to allocate" in page
    for other in ("troubleshooting.md", "alerts.md", "../index.md"):
        assert "cuda-out-of-memory.md" in (DOCS / "operate" / other).read_text()


def test_the_timeline_of_the_victim_has_the_overcommitment_and_the_crash(
    incident: Incident,
) -> None:
    incident.crash("2026-11-21T00:01:12Z")
    incident.at(200, llm=7, chat=0)
    body = incident.asked.get("/v1/timeline?pod=ml/chat").json()
    found = [(each["at"][11:19], each["kind"], each["message"]) for each in body["entries"]]
    who = "pod ml/llm used 17.5 GiB, 9.5 GiB more than it reserved"
    assert found[-3:] == [
        (
            "00:01:10",
            "overcommitted",
            f"GPU 0 of node gpu-a became overcommitted, by up to 5.5 GiB: {who}",
        ),
        (
            "00:01:12",
            "crashed",
            "container main ended with exit code 1 (Error) at 2026-11-21T00:01:12Z, while GPU 0 "
            "of node gpu-a was overcommitted: CUDA probably reported out of memory, see the log "
            "of the container",
        ),
        ("00:03:20", "relieved", "GPU 0 of node gpu-a is no longer overcommitted"),
    ]


def test_changes_say_when_overuse_and_overcommitment_began_and_ended() -> None:
    found = Incident()
    feed = Feed(lambda: WALL_S + found.asked.now_s, lambda: 1)
    changes = MemoryChanges(found.asked.cluster, feed)
    found.at(0, llm=7, chat=4)
    changes.check()
    assert feed.past() == []
    for now_s in (70, 140):  # overuse is reported after it has lasted for a minute
        found.at(now_s, llm=17.5, chat=4)
        changes.check()
    found.at(200, llm=7, chat=0)
    changes.check()
    assert [(each.kind, each.name, each.message) for each in feed.past()] == [
        (
            "overcommit_began",
            "llm",
            f"GPU 0 of node gpu-a is overcommitted by 5.5 GiB since 2026-11-21T00:01:10Z: {BLAME}",
        ),
        (
            "overuse_began",
            "llm",
            "uses 17.5 GiB, 9.5 GiB more than it reserved since 2026-11-21T00:01:10Z",
        ),
        (
            "overcommit_ended",
            "llm",
            "GPU 0 of node gpu-a was overcommitted by up to 5.5 GiB from 2026-11-21T00:01:10Z to "
            "2026-11-21T00:03:20Z: pod ml/llm used 17.5 GiB, 9.5 GiB more than it reserved",
        ),
        ("overuse_ended", "llm", "used 17.5 GiB, 9.5 GiB more than it reserved"),
    ]


def test_drift_says_ok_neither_of_the_culprit_nor_of_the_victims(incident: Incident) -> None:
    rows = drift(incident.asked.get("/v1/drift").json(), None).rows
    assert {row[1]: row[-1] for row in rows} == {
        "llm": "uses 9.5 GiB more than reserved; its GPU is overcommitted by 5.5 GiB",
        "chat": "its GPU is overcommitted by 5.5 GiB",
        "embed": "its GPU is overcommitted by 5.5 GiB",
    }
    incident.at(200, llm=7, chat=4)
    rows = drift(incident.asked.get("/v1/drift").json(), None).rows
    assert {row[-1] for row in rows} == {"ok"}


def test_an_event_on_the_victim_names_only_pods_of_its_namespace(incident: Incident) -> None:
    def crash_events() -> list[str]:
        found = notices(incident.asked.cluster)
        return [each.message for each in found if each.reason == "CrashedOnOvercommittedGPU"]

    assert crash_events() == []
    incident.crash("2026-11-21T00:01:12Z")
    start = (
        "Container main ended with exit code 1 (Error) at 2026-11-21T00:01:12Z. CUDA probably "
        "reported out of memory, because GPU 0 of node gpu-a is overcommitted by 5.5 GiB since "
        "2026-11-21T00:01:10Z: "
    )
    more = "To see what the pod got: kubectl headroom why chat -n ml"
    assert crash_events() == [f"{start}{BLAME}. {more}"]
    (crash,) = crashes_of(incident.asked.cluster, crashed(running("chat"), "2026-11-21T00:01:12Z"))
    other = crash.crowding.causes(
        lambda namespace, _: namespace == "web", "a pod of another namespace"
    )
    assert other == "a pod of another namespace uses 17.5 GiB, 9.5 GiB more than it reserved"
