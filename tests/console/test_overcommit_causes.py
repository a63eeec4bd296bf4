"""Tests that the cause of an overcommitted GPU is the present cause, with present amounts, and that
pods without a reservation have a name.

One GPU of 24 GiB has three pods: llm reserved 8 GiB, chat 8 GiB and embed 4 GiB. Pod other/rogue
has no reservation.
"""

from headroom.console.feed.feed import Feed
from headroom.console.feed.memory_changes import MemoryChanges
from headroom.core.cluster.crowded_pods import crowdings_of
from headroom.core.cluster.notices import notices
from headroom.kubectl.top import devices
from headroom.kubectl.top_pods import pods
from tests.console.asking import WALL_S
from tests.console.test_crash import Incident

GPU = "GPU 0 of node gpu-a"
ROGUE = "pod other/rogue uses 9.0 GiB without a reservation"


def taken_over() -> Incident:
    """Return an incident in which llm overcommits the GPU by 5.5 GiB at 00:01:10, and rogue instead
    of llm by 5 GiB at 00:02:00."""
    found = Incident()
    found.at(0, llm=7, chat=4)
    found.at(70, llm=17.5, chat=4)
    found.at(120, llm=8, chat=4, rogue=9)
    return found


def test_why_names_the_present_cause_with_the_present_excess() -> None:
    lines = taken_over().why("chat")
    now = f"{GPU} is overcommitted by 5.0 GiB since 2026-11-21T00:02:00Z: {ROGUE}"
    assert lines[0] == f"Pod ml/chat: bound to node gpu-a; {now}"
    assert f"  {now}" in lines
    assert (
        f"  {GPU} was overcommitted by up to 5.5 GiB from 2026-11-21T00:01:10Z to "
        "2026-11-21T00:02:00Z: pod ml/llm used 17.5 GiB, 9.5 GiB more than it reserved"
    ) in lines


def test_why_shows_the_present_amount_of_a_cause_that_shrinks() -> None:
    incident = Incident()
    incident.at(70, llm=17.5, chat=4)
    incident.at(120, llm=13, chat=4)
    assert incident.why("chat")[0].endswith(
        f"{GPU} is overcommitted by 1.0 GiB since 2026-11-21T00:01:10Z or earlier: pod ml/llm uses "
        "13.0 GiB, 5.0 GiB more than it reserved"
    )


def test_another_cause_after_a_calm_report_begins_another_overcommitment() -> None:
    incident = Incident()
    feed = Feed(lambda: WALL_S + incident.asked.now_s, lambda: 1)
    changes = MemoryChanges(incident.asked.cluster, feed)
    for at_s, llm, rogue in ((0, 7, 0), (70, 17.5, 0), (95, 7, 0), (100, 8, 9)):
        incident.at(at_s, llm=llm, chat=4, rogue=rogue)
        changes.check()
    assert [(each.kind, each.name) for each in feed.past()] == [
        ("overcommit_began", "llm"),
        ("overcommit_ended", "llm"),
        ("overcommit_began", "rogue"),
    ]
    began = f"{GPU} is overcommitted by 5.0 GiB since 2026-11-21T00:01:40Z: {ROGUE}"
    assert feed.past()[-1].message == began
    assert incident.why("chat")[0].endswith(began)


def test_the_log_says_when_another_cause_takes_over() -> None:
    incident = Incident()
    feed = Feed(lambda: WALL_S + incident.asked.now_s, lambda: 1)
    changes = MemoryChanges(incident.asked.cluster, feed)
    for at_s, llm, rogue in ((0, 7, 0), (70, 17.5, 0), (90, 8, 9)):
        incident.at(at_s, llm=llm, chat=4, rogue=rogue)
        changes.check()
    assert [(each.kind, each.name) for each in feed.past()] == [
        ("overcommit_began", "llm"),
        ("overcommit_ended", "llm"),
        ("overcommit_began", "rogue"),
    ]


def test_the_timeline_has_each_cause_and_its_time() -> None:
    incident = taken_over()
    incident.at(180, llm=7, chat=4)
    body = incident.asked.get("/v1/timeline?pod=ml/chat").json()
    found = [(each["at"][11:19], each["kind"], each["message"]) for each in body["entries"]]
    assert found[-3:] == [
        (
            "00:01:10",
            "overcommitted",
            f"{GPU} became overcommitted, by up to 5.5 GiB: pod ml/llm used 17.5 GiB, 9.5 GiB more "
            "than it reserved",
        ),
        (
            "00:02:00",
            "overcommitted",
            f"{GPU} is still overcommitted, by up to 5.0 GiB: pod other/rogue used 9.0 GiB without "
            "a reservation",
        ),
        ("00:03:00", "relieved", f"{GPU} is no longer overcommitted"),
    ]


def test_a_crash_is_attributed_to_the_cause_at_its_time() -> None:
    incident = taken_over()
    incident.crash("2026-11-21T00:01:55Z")
    assert incident.why("chat")[0].endswith(
        f"while {GPU} was overcommitted: pod ml/llm used 17.5 GiB, 9.5 GiB more than it reserved"
    )
    incident.crash("2026-11-21T00:02:05Z")
    assert incident.why("chat")[0].endswith(f"while {GPU} was overcommitted: {ROGUE}")


def test_the_event_of_a_crash_names_a_pod_without_a_reservation() -> None:
    """An Event names only pods of its namespace."""
    incident = taken_over()
    incident.crash("2026-11-21T00:02:05Z")
    (crash,) = (
        each.message
        for each in notices(incident.asked.cluster)
        if each.reason == "CrashedOnOvercommittedGPU"
    )
    assert "a pod of another namespace uses 9.0 GiB without a reservation." in crash
    (now, _) = crowdings_of(incident.asked.cluster, "u-chat")
    assert now.causes(lambda *_: True) == ROGUE
    assert now.causes(lambda *_: False) == (
        "a pod that you may not read uses 9.0 GiB without a reservation"
    )


def test_the_event_of_the_node_says_how_to_list_pods_without_a_reservation() -> None:
    """Events on nodes are in namespace default, and their readers may not read other pods."""
    (event,) = (
        each.message
        for each in notices(taken_over().asked.cluster)
        if each.reason == "GPUOvercommitted"
    )
    assert (
        "9.0 GiB used by 1 pod without a reservation (to list: kubectl headroom top pod -A "
        "--search gpu-a)." in event
    )
    assert "rogue" not in event


def test_processes_of_no_known_pod_are_another_cause_than_pods_without_a_reservation() -> None:
    incident = Incident()
    incident.at(0, llm=4, chat=2, rogue=5, process=4)
    cause = incident.why("chat")[0].split(": ")[-1]
    assert cause.startswith(
        "pod other/rogue uses 5.0 GiB without a reservation, processes of no known pod use "
    )


def test_top_pod_lists_pods_without_a_reservation_that_use_memory() -> None:
    incident = taken_over()
    body = incident.asked.get("/v1/nodes").json()
    table = pods(body, None)
    rogue = ("other", "rogue", "gpu-a", "0", "-", "9.0 GiB")
    assert table.rows[0] == (*rogue, "no reservation; its GPU is overcommitted")
    assert 0 in table.bad
    assert {row[1] for row in table.rows[1:]} == {"llm", "chat", "embed"}
    assert "rogue" not in {row[1] for row in pods(body, "ml").rows}
    for text, nodes in (("other/rogue", 1), ("other/else", 0)):
        assert len(incident.asked.get(f"/v1/nodes?search={text}").json()["nodes"]) == nodes
    incident.at(180, llm=7, chat=4, rogue=1)
    last = pods(incident.asked.get("/v1/nodes").json(), None).rows[-1]
    assert last == ("other", "rogue", "gpu-a", "0", "-", "1.0 GiB", "no reservation")


def test_top_gpu_distinguishes_pods_without_a_reservation_from_unattributed_memory() -> None:
    incident = taken_over()
    state = devices(incident.asked.get("/v1/nodes").json()).rows[0][-1]
    assert state.startswith("overcommitted; ")
    assert state.endswith("; 9.0 GiB used by pods without a reservation")
    incident.at(180, llm=4, chat=2, rogue=5, process=4)
    state = devices(incident.asked.get("/v1/nodes").json()).rows[0][-1]
    assert "; 5.0 GiB used by pods without a reservation; " in state
    assert state.endswith(" GiB unattributed")


def test_why_a_pod_that_requests_no_gpu_states_its_use() -> None:
    answer = taken_over().asked.get("/v1/explain?pod=other/rogue")
    assert answer.status_code == 404
    assert answer.json()["detail"].startswith(
        "pod other/rogue uses 9.0 GiB of the GPUs of node gpu-a without a reservation: it requests "
        "none of the resources that Headroom manages (nvidia.com/gpu"
    )


def test_the_risk_names_a_pod_without_a_reservation() -> None:
    (risk,) = taken_over().asked.get("/v1/overview").json()["at_risk"]
    assert risk["message"].endswith(
        ": 5.0 GiB too much; other/rogue uses 9.0 GiB without a reservation"
    )
    assert risk["pods"][0] == {"namespace": "other", "name": "rogue"}
