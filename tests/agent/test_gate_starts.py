"""Checks that pods that start alone start one after another, even if all containers restart."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gate_service import GateService
from agent.gate_starts import GateStarts
from headroom.contract.gpunode import ADOPTED, GPUNode, GPUNodeStatus, PodUse, Reservation
from tests.agent.gate_node import DEVICES, node, reservation, row, status

TIMEOUT_S = 600
WAITS = "another pod that starts alone is starting on the same device"


def of(phase: Any = "running", **changes: Any) -> Reservation:
    made = reservation(10, count=changes.pop("count", 1))
    return msgspec.structs.replace(made, phase=phase, start_timeout_s=TIMEOUT_S, **changes)


class Agent:
    """The gate of an agent. A test sets the reservations, the rows and the clock."""

    def __init__(self, state: Path | None = None) -> None:
        self.state = state
        self.now_s = 1000.0
        self.observed_at = "now"
        self.ledger: dict[str, Reservation] = {}
        self.rows: dict[str, list[PodUse]] = {}
        self.restart()

    def restart(self) -> None:
        self._service = GateService(
            self,
            self._sample,
            lambda: 0,
            lambda: self.now_s,
            GateStarts(self.state, lambda: self.now_s),
        )

    def _shown(self) -> Iterable[PodUse]:
        return [each for of_pod in self.rows.values() for each in of_pod]

    def _sample(self) -> GPUNodeStatus:
        return msgspec.structs.replace(status(*self._shown()), observed_at=self.observed_at)

    def gpunode(self, within_s: float = 0.0) -> GPUNode:
        return node(self.ledger, self._sample())

    def admit(self, uid: str, *rows: PodUse, **of_reservation: Any) -> None:
        """Add a pod that holds its replicas but does not use memory yet."""
        self.ledger[uid] = of(**of_reservation)
        self.rows[uid] = list(rows) or [row(uid, "GPU-a")]

    def ask(self, uid: str) -> str:
        """Ask the gate for the pod. Return the answer, or the reason why the pod waits."""
        self.now_s += 1.0
        verdict = self._service.ask(uid)
        return verdict.reason or verdict.answer

    def show(self, uid: str, used: int, started_at: str, settled_at: str = "") -> None:
        """Report the use of the pod. The current run of each of its containers began at
        ``started_at``.
        """
        self.rows[uid] = [
            msgspec.structs.replace(
                each, used_bytes=used, started_at=started_at, settled_at=settled_at
            )
            for each in self.rows[uid]
        ]


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    made = Agent(tmp_path / "state.json")
    made.admit("p")
    made.admit("q")
    return made


def test_pods_that_restart_start_one_after_the_other(agent: Agent) -> None:
    """All containers of the node restart after a reboot."""
    assert [agent.ask(uid) for uid in "pq"] == ["yes", WAITS]
    agent.show("p", 0, "second")
    assert agent.ask("q") == WAITS
    agent.show("p", 5, "second")
    assert agent.ask("q") == WAITS
    agent.show("p", 5, "second", "later")
    assert agent.ask("q") == "yes"


def test_the_previous_run_does_not_end_a_start(agent: Agent) -> None:
    """The report still shows the previous run until the next process of the container uses the
    device.
    """
    for uid in "pq":
        agent.show(uid, 0, "first", "settled")
    assert [agent.ask(uid) for uid in "pq"] == ["yes", WAITS]
    agent.show("p", 5, "second")
    assert agent.ask("q") == WAITS
    agent.show("p", 5, "second", "settled again")
    assert agent.ask("q") == "yes"


def test_only_pods_that_start_alone_on_the_same_device_wait(agent: Agent) -> None:
    agent.admit("elsewhere", row("elsewhere", "GPU-b"))
    agent.admit("ordinary", phase="")
    assert agent.ask("p") == "yes"
    assert [agent.ask(uid) for uid in ("elsewhere", "ordinary", "q")] == ["yes", "yes", WAITS]


def test_a_start_that_does_not_settle_blocks_others_until_its_timeout(agent: Agent) -> None:
    assert agent.ask("p") == "yes"
    agent.now_s += TIMEOUT_S - 10.0
    assert agent.ask("q") == WAITS
    agent.now_s += 10.0
    assert agent.ask("q") == "yes"


def test_a_pod_that_never_settles_blocks_others_once(agent: Agent) -> None:
    """The pod restarts repeatedly, or another process calls the gate with the pod's UID."""
    assert agent.ask("p") == "yes"
    agent.now_s += TIMEOUT_S / 2
    assert agent.ask("p") == "yes"
    agent.now_s += TIMEOUT_S / 2
    assert agent.ask("p") == "yes"
    assert agent.ask("q") == "yes"
    agent.show("q", 5, "second", "settled")
    agent.show("p", 5, "second", "settled")
    assert [agent.ask(uid) for uid in "pq"] == ["yes", WAITS]


def test_a_deleted_pod_blocks_no_start(agent: Agent) -> None:
    assert agent.ask("p") == "yes"
    del agent.ledger["p"], agent.rows["p"]
    assert agent.ask("q") == "yes"


def test_a_start_is_remembered_after_a_restart_of_the_agent_but_not_of_the_node(
    agent: Agent,
) -> None:
    assert agent.ask("p") == "yes"
    agent.restart()
    assert agent.ask("q") == WAITS
    agent.now_s = 10.0
    agent.restart()
    assert [agent.ask(uid) for uid in "qp"] == ["yes", WAITS]


def test_a_start_is_forgotten_by_an_agent_without_a_state_file() -> None:
    agent = Agent()
    agent.admit("p")
    agent.admit("q")
    assert [agent.ask(uid) for uid in "pq"] == ["yes", WAITS]
    agent.restart()
    assert agent.ask("q") == "yes"


def test_first_and_later_starts_wait_for_each_other_in_the_order_of_their_beginnings(
    agent: Agent,
) -> None:
    agent.admit("new", phase="starting", since="2026-11-21T00:00:00.000+00:00")
    assert [agent.ask(uid) for uid in ("p", "new")] == ["yes", WAITS]
    agent.show("p", 5, "second", "settled")
    assert [agent.ask(uid) for uid in ("new", "q")] == ["yes", WAITS]
    agent.restart()
    assert agent.ask("q") == WAITS
    agent.ledger["new"] = of()  # An extender has recorded that the pod is ready.
    assert agent.ask("q") == "yes"


def test_a_pod_bound_by_another_scheduler_is_starting_when_it_uses_memory(
    agent: Agent,
) -> None:
    """The pod does not call the agent, because it has no gate."""
    agent.admit("adopted", phase="starting", flags=[ADOPTED])
    agent.show("adopted", 5, "first")
    assert agent.ask("p") == WAITS
    agent.show("adopted", 5, "first", "settled")
    agent.ledger["adopted"] = of()
    assert agent.ask("p") == "yes"


def test_a_timeout_that_no_extender_records_ends_the_wait(agent: Agent) -> None:
    """The extenders also have to restart, and a reservation still has a start from before the
    reboot.
    """
    agent.admit("old", phase="starting", since="2026-11-21T00:00:00.000+00:00")
    agent.show("old", 5, "second")
    agent.observed_at = "2026-11-21T00:09:59.000000Z"
    assert agent.ask("p") == WAITS
    agent.observed_at = "2026-11-21T00:10:00.000000Z"
    assert agent.ask("p") == "yes"


def test_two_interrupted_first_starts_do_not_wait_for_each_other(agent: Agent) -> None:
    """Both pods started at the same time, which is allowed on predicted devices, and then all
    containers restart. The report shows the previous runs.
    """
    for number, uid in enumerate("pq"):
        since = f"2026-11-21T00:00:0{number}.000+00:00"
        agent.admit(uid, phase="starting", since=since)
        agent.show(uid, 0, "first")
    assert agent.ask("p") == WAITS  # q may be running.
    assert agent.ask("q") == WAITS
    assert [agent.ask(uid) for uid in "pq"] == ["yes", WAITS]


def changed(each: PodUse, container: str, began: bool, settled: bool, used: int) -> PodUse:
    return msgspec.structs.replace(
        each,
        container=container,
        used_bytes=used,
        started_at="second" if began else "",
        settled_at="later" if settled else "",
    )


@pytest.mark.parametrize(
    ("containers", "answer"),
    [
        pytest.param([("convert", 1, 1, 5), ("engine", 0, 0, 0)], WAITS, id="init container runs"),
        pytest.param(
            [("convert", 1, 0, 0), ("engine", 0, 0, 0)], WAITS, id="init container has ended"
        ),
        pytest.param([("convert", 1, 0, 0), ("engine", 1, 0, 5)], WAITS, id="the engine loads"),
        pytest.param([("convert", 1, 0, 0), ("engine", 1, 1, 5)], "yes", id="the engine settled"),
        pytest.param([("one", 1, 1, 5), ("two", 1, 0, 5)], WAITS, id="the second engine loads"),
        pytest.param([("one", 1, 1, 5), ("two", 1, 1, 5)], "yes", id="both engines settled"),
    ],
)
def test_a_start_lasts_until_the_engines_of_the_pod_have_settled(
    agent: Agent, containers: list[tuple[str, int, int, int]], answer: str
) -> None:
    rows = [row("p", "GPU-a", replica=name, container=name) for name, *_ in containers]
    agent.admit("p", *rows)
    assert agent.ask("p") == "yes"
    agent.rows["p"] = [
        changed(each, name, bool(began), bool(settled), used)
        for each, (name, began, settled, used) in zip(rows, containers, strict=True)
    ]
    assert agent.ask("q") == answer


def test_use_on_a_device_that_the_pod_chose_itself_ends_its_start(agent: Agent) -> None:
    agent.admit("p", row("p", "GPU-a", container="main"))
    assert agent.ask("p") == "yes"
    own = PodUse("p", "GPU-b", used_bytes=5, started_at="second")
    agent.rows["p"].append(own)
    assert agent.ask("q") == WAITS
    agent.rows["p"][1] = msgspec.structs.replace(own, settled_at="later")
    assert agent.ask("q") == "yes"


@given(
    holds=st.lists(st.sampled_from([DEVICES[:1], DEVICES[1:], DEVICES]), min_size=2, max_size=5),
    first=st.sets(st.integers(0, 4)),
    turns=st.lists(st.integers(0, 4), max_size=40),
)
def test_all_pods_start_but_never_two_at_once_on_one_device(
    holds: list[tuple[str, ...]], first: set[int], turns: list[int]
) -> None:
    """Pods call the gate in any order, for their first start or a later start."""
    agent = Agent()
    for number, devices in enumerate(holds):
        uid = f"pod-{number}"
        phase = "starting" if number in first else "running"
        since = f"2026-11-21T00:00:0{number}.000+00:00"
        rows = [row(uid, uuid) for uuid in devices]
        agent.admit(uid, *rows, phase=phase, since=since, count=len(devices))
    loading: list[int] = []
    waiting = set(range(len(holds)))
    for number in [*turns, *[*range(len(holds))] * len(holds) * 2]:
        uid = f"pod-{number}"
        if number in loading:
            loading.remove(number)
            agent.show(uid, 5, "second", "settled")
            agent.ledger[uid] = msgspec.structs.replace(agent.ledger[uid], phase="running")
        elif number in waiting and agent.ask(uid) == "yes":
            waiting.remove(number)
            taken = [uuid for other in [number, *loading] for uuid in holds[other]]
            assert len(taken) == len(set(taken))
            loading.append(number)
    assert not waiting
