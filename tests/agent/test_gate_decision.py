"""Whether a gated pod may start: never two that are too much for the device they both got."""

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gate_decision import Limits, Verdict, judge
from agent.gate_service import GateService
from agent.kube_publisher import NotDelivered
from contract.errors import BadReport
from contract.gpunode import (
    EVICTED,
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Replicas,
    Reservation,
    Source,
)
from contract.kube import ObjectMeta

READ_EVERY_S = 1.0

GPU = "nvidia.com/gpu"
DEVICES = ("GPU-a", "GPU-b")
MEMORY = 100
SOURCES = [Source("checkpoint"), Source("proc")]


def device(uuid: str, **changes: Any) -> Device:
    shown = {
        "memory_bytes": MEMORY,
        "reserved_bytes": 0,
        "used_bytes": 0,
        "unattributed_bytes": 0,
        "sharing": "time-slicing",
        "resource": GPU,
        "replicas": Replicas(free=4),
    }
    return Device(uuid, **(shown | changes))


def reservation(asked: int, *candidates: str, count: int = 1, name: str = "p") -> Reservation:
    on = dict.fromkeys(candidates or DEVICES, asked)
    return Reservation("default", name, [Charge(GPU, count, on)])


def row(uid: str, uuid: str, used: int | None = 0, replica: str = "0", **more: str) -> PodUse:
    return PodUse(uid, uuid, replica=f"{uuid}::{uid}{replica}", used_bytes=used, **more)


def stray(used: int | None) -> PodUse:
    """A pod that holds no replica, and yet is there."""
    return PodUse("s", "GPU-a", used_bytes=used)


def node(
    reservations: dict[str, Reservation], sample: GPUNodeStatus | None, initialised: bool = True
) -> GPUNode:
    spec = GPUNodeSpec(initialised=initialised, reservations=reservations)
    return GPUNode(ObjectMeta(name="n1"), spec=spec, status=sample)


def status(
    *rows: PodUse,
    devices: Sequence[Device] = tuple(map(device, DEVICES)),
    sources: Sequence[Source] = SOURCES,
) -> GPUNodeStatus:
    return GPUNodeStatus("now", list(devices), list(rows), sources=list(sources))


def ask(
    reservations: dict[str, Reservation],
    sample: GPUNodeStatus,
    uid: str = "p",
    written: GPUNodeStatus | None = None,
    reserve: int = 0,
    tolerance: int = 0,
    **more: Any,
) -> Verdict:
    held = node(reservations, sample if written is None else written, **more)
    return judge(held, sample, uid, Limits(reserve, tolerance))


def test_a_pod_that_is_charged_on_its_device_may_start() -> None:
    assert ask({"p": reservation(100)}, status(row("p", "GPU-a"))) == Verdict("yes")


def test_a_pod_on_an_unpredicted_device_is_counted_there() -> None:
    here = status(row("p", "GPU-a"), row("q", "GPU-a"))
    reservations = {"p": reservation(60, "GPU-b"), "q": reservation(40, "GPU-a")}
    assert ask(reservations, here).answer == "yes"
    reservations["q"] = reservation(41, "GPU-a")
    assert ask(reservations, here) == Verdict(
        "no", "the device of this pod does not have enough free memory"
    )
    # Whichever of the two goes, the other may start.
    assert ask(reservations, status(row("p", "GPU-a"))).answer == "not yet"  # q is unconfirmed
    del reservations["q"]
    assert ask(reservations, status(row("p", "GPU-a"))).answer == "yes"


WAITS = Verdict("not yet", "another pod that starts alone is starting on the same device")


def starting(second: int, *candidates: str, phase: Any = "starting", count: int = 1) -> Reservation:
    made = reservation(10, *candidates, count=count)
    since = f"2026-11-21T00:00:{second:02}.000+00:00"
    return msgspec.structs.replace(made, since=since, phase=phase, start_timeout_s=600)


def test_pods_that_start_alone_start_in_the_order_of_the_ledger() -> None:
    both = status(row("p", "GPU-a"), row("q", "GPU-a"))
    reservations = {"p": starting(1), "q": starting(2)}
    assert ask(reservations, both, "p") == Verdict("yes")
    assert ask(reservations, both, "q") == WAITS
    reservations["p"] = starting(1, phase="running")
    assert ask(reservations, both, "q") == Verdict("yes")
    same_time = {"p": starting(1), "q": starting(1)}
    assert [ask(same_time, both, uid).answer for uid in "pq"] == ["yes", "not yet"]


def test_only_pods_on_the_same_device_start_one_after_the_other() -> None:
    apart = status(row("p", "GPU-a"), row("q", "GPU-b"))
    reservations = {"p": starting(1), "q": starting(2)}
    assert [ask(reservations, apart, uid).answer for uid in "pq"] == ["yes", "yes"]
    ordinary = {"p": starting(1), "q": starting(2, phase="")}
    both = status(row("p", "GPU-a"), row("q", "GPU-a"))
    assert [ask(ordinary, both, uid).answer for uid in "pq"] == ["yes", "yes"]


def test_a_pod_waits_for_an_earlier_one_that_may_get_its_device() -> None:
    """The later pod was admitted first. The earlier one can still get either GPU."""
    reservations = {"p": starting(1), "q": starting(2)}
    assert ask(reservations, status(row("q", "GPU-a")), "q") == WAITS
    assert ask({"p": starting(3), "q": starting(2)}, status(row("q", "GPU-a")), "q").answer == "yes"


def test_a_pod_waits_for_a_later_one_that_has_begun() -> None:
    """The reservations were written again in another order, after the GPUNode was lost."""
    reservations = {"p": starting(1), "q": starting(2)}
    begun = row("q", "GPU-a", started_at="2026-11-21T00:00:00Z")
    assert ask(reservations, status(row("p", "GPU-a"), begun), "p") == WAITS
    assert ask(reservations, status(row("p", "GPU-a"), row("q", "GPU-a", used=1)), "p") == WAITS
    assert ask(reservations, status(row("p", "GPU-b"), begun), "p").answer == "yes"


@pytest.mark.parametrize("order", [*permutations("pqr")])
def test_pods_with_several_devices_wait_in_no_circle(order: tuple[str, ...]) -> None:
    """p holds both GPUs, q and r hold one each. In any order all of them start, and no two of them
    start at the same time on one GPU."""
    on = {"p": DEVICES, "q": DEVICES[:1], "r": DEVICES[1:]}
    ledger = {uid: starting(n, count=len(on[uid])) for n, uid in enumerate(order)}
    begun: list[str] = []
    while waiting := [uid for uid in order if ledger[uid].phase == "starting"]:
        at = {uid: "2026-11-21T00:00:00Z" if uid in begun else "" for uid in order}
        sample = status(*(row(u, uuid, replica=u, started_at=at[u]) for u in on for uuid in on[u]))
        begun += [u for u in waiting if u not in begun and ask(ledger, sample, u).answer == "yes"]
        assert begun[:1] == waiting[:1]
        taken = [uuid for uid in begun for uuid in on[uid]]
        assert len(taken) == len({*taken})
        settled = begun.pop(0)
        ledger[settled] = msgspec.structs.replace(ledger[settled], phase="running")


@pytest.mark.parametrize(
    ("sample", "more"),
    [
        pytest.param(status(), {}, id="the kubelet has not admitted it"),
        pytest.param(status(row("q", "GPU-a")), {}, id="another pod is there"),
        pytest.param(
            status(PodUse("p", "GPU-a", used_bytes=1)), {}, id="it holds nothing, and yet is there"
        ),
        pytest.param(status(row("p", "GPU-z")), {}, id="its device is not known"),
        pytest.param(
            status(row("p", "GPU-a")), {"initialised": False}, id="the ledger is not ready"
        ),
        pytest.param(
            status(row("p", "GPU-a")), {"written": status()}, id="the report was not written"
        ),
        pytest.param(
            status(row("p", "GPU-a")),
            {"written": status(row("p", "GPU-b"))},
            id="the report that was written shows it elsewhere",
        ),
        pytest.param(
            status(row("p", "GPU-a"), sources=[Source("checkpoint", "degraded")]),
            {},
            id="who holds what is not known",
        ),
        pytest.param(
            status(row("p", "GPU-a"), devices=[device("GPU-a", memory_bytes=-1)]),
            {},
            id="the memory is not known",
        ),
    ],
)
def test_what_is_not_known_yet_is_waited_for(sample: GPUNodeStatus, more: dict[str, Any]) -> None:
    assert ask({"p": reservation(1)}, sample, **more).answer == "not yet"


def test_a_pod_without_a_reservation_waits() -> None:
    assert ask({}, status(row("p", "GPU-a"))).answer == "not yet"


def test_a_pod_waits_until_it_holds_all_reserved_devices() -> None:
    reservations = {"p": reservation(10, count=2)}
    assert ask(reservations, status(row("p", "GPU-a"))).answer == "not yet"
    # An app container reuses what the init container had: one replica, two rows.
    twice = status(row("p", "GPU-a", container="i"), row("p", "GPU-a", container="m"))
    assert ask(reservations, twice).answer == "not yet"
    assert ask(reservations, status(row("p", "GPU-a"), row("p", "GPU-b"))).answer == "yes"


def test_of_several_devices_the_worst_decides() -> None:
    both = status(row("p", "GPU-a"), row("p", "GPU-b"), row("q", "GPU-b"))
    reservations = {"p": reservation(60, count=2), "q": reservation(41)}
    assert ask(reservations, both).answer == "no"


def test_a_broken_device_is_none_to_start_on() -> None:
    sample = status(row("p", "GPU-a"), devices=[device("GPU-a", healthy=False)])
    assert ask({"p": reservation(1)}, sample).answer == "no"


@pytest.mark.parametrize(
    ("room", "sample"),
    [
        pytest.param(30, status(row("p", "GPU-a"), stray(70)), id="use of an unreserved pod"),
        pytest.param(
            30,
            status(row("p", "GPU-a"), devices=[device("GPU-a", unattributed_bytes=70)]),
            id="a stranger's",
        ),
        pytest.param(
            30,
            status(row("p", "GPU-a", None), stray(None),
                   devices=[device("GPU-a", unattributed_bytes=None, used_bytes=100)]),
            id="use is not attributed: that of the pod itself is unknown",
        ),
    ],
)  # fmt: skip
def test_unreserved_use_takes_memory(room: int, sample: GPUNodeStatus) -> None:
    assert ask({"p": reservation(room)}, sample).answer == "yes"
    if sample.devices[0].unattributed_bytes is not None:
        assert ask({"p": reservation(room + 1)}, sample).answer == "no"
        assert ask({"p": reservation(room)}, sample, reserve=1).answer == "no"


def test_a_little_unattributed_use_is_not_charged() -> None:
    sample = status(row("p", "GPU-a"), devices=[device("GPU-a", unattributed_bytes=8)])
    assert ask({"p": reservation(100)}, sample, tolerance=8).answer == "yes"
    assert ask({"p": reservation(100)}, sample, tolerance=7).answer == "no"


def test_a_neighbour_without_measured_use_is_charged_its_reservation() -> None:
    nameless = PodUse("", "GPU-a", "default", "q", replica="GPU-a::1")
    sample = status(row("p", "GPU-a"), nameless)
    assert ask({"p": reservation(60), "q": reservation(41, name="q")}, sample).answer == "no"


def test_no_pod_starts_beside_a_pod_without_a_reservation() -> None:
    """The use of that pod is unknown."""
    beside = status(row("p", "GPU-a"), row("bypass", "GPU-a"))
    assert ask({"p": reservation(10)}, beside).answer == "not yet"
    elsewhere = status(row("p", "GPU-a"), row("bypass", "GPU-b"))
    assert ask({"p": reservation(10)}, elsewhere).answer == "yes"
    adopted = {"p": reservation(10), "bypass": reservation(90)}
    assert ask(adopted, beside).answer == "yes"
    assert ask(adopted | {"bypass": reservation(91)}, beside).answer == "no"


def test_a_static_neighbour_is_known_by_its_name() -> None:
    """The kubelet calls it by the hash of its manifest, the API server by another uid."""
    static = row("0" * 32, "GPU-a", namespace="default", name="q")
    sample = status(row("p", "GPU-a"), static)
    assert ask({"p": reservation(60), "u": reservation(40, name="q")}, sample).answer == "yes"
    assert ask({"p": reservation(60), "u": reservation(41, name="q")}, sample).answer == "no"
    assert ask({"p": reservation(60)}, sample).answer == "not yet"


def test_a_pod_that_is_to_leave_does_not_start_any_more() -> None:
    """However much room there came to be meanwhile."""
    leaves = msgspec.structs.replace(reservation(10), flags=[EVICTED])
    assert ask({"p": leaves}, status(row("p", "GPU-a"))).answer == "no"


def test_instances_that_share_memory_are_weighed_together() -> None:
    mig = {"kind": "mig", "parent": "GPU", "gpu_instance": 1, "sharing": "none"}
    both = [device(uuid, replicas=Replicas(allocated=1), **mig) for uuid in DEVICES]
    sample = status(row("p", "GPU-a"), row("q", "GPU-b"), devices=both)
    assert ask({"p": reservation(60), "q": reservation(40)}, sample).answer == "yes"
    assert ask({"p": reservation(60), "q": reservation(41)}, sample).answer == "no"


def test_an_unshared_device_has_no_unconfirmed_pods() -> None:
    alone = [device(uuid, sharing="none", replicas=Replicas(allocated=1)) for uuid in DEVICES]
    sample = status(row("p", "GPU-a"), devices=alone)
    assert ask({"p": reservation(100), "q": reservation(100)}, sample).answer == "yes"


asked = st.integers(1, MEMORY)
places = st.sampled_from([*DEVICES, None])


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[dict[str, Reservation], GPUNodeStatus]]:
    """Pods come, are admitted and go, one change after another."""
    reservations: dict[str, Reservation] = {}
    where: dict[str, str] = {}
    shown = []
    for number in range(draw(st.integers(1, 12))):
        match draw(st.sampled_from(["reservation", "admit", "admit", "go"])):
            case "reservation":
                some = draw(st.lists(st.sampled_from(DEVICES), min_size=1, unique=True))
                reservations |= {f"p{number}": reservation(draw(asked), *some)}
            case "admit" if waiting := sorted(reservations.keys() - where.keys()):
                where |= {draw(st.sampled_from(waiting)): draw(st.sampled_from(DEVICES))}
            case "go" if where:
                gone = draw(st.sampled_from(sorted(where)))
                where.pop(gone)
                reservations = {uid: kept for uid, kept in reservations.items() if uid != gone}
        used = draw(st.integers(0, MEMORY))
        rows = [row(uid, uuid, draw(st.integers(0, used))) for uid, uuid in where.items()]
        shown.append((dict(reservations), status(*rows)))
    return shown


@given(stories(), st.randoms(use_true_random=False))
def test_pods_that_may_start_never_ask_for_more_than_there_is(
    story: list[tuple[dict[str, Reservation], GPUNodeStatus]], chance: Any
) -> None:
    """However old the ledger as read is, and however long ago each of them asked."""
    started: set[str] = set()
    for now, (reservations, sample) in enumerate(story):
        where = {use.uid: use.device for use in sample.pods}
        started &= where.keys()
        asking = sorted(where)
        chance.shuffle(asking)
        for uid in asking:
            # The ledger may have been read a moment ago: it may lack reservations.
            old = chance.randrange(max(0, now - 1), now + 1)
            then, written = story[old]
            if ask(then, sample, uid, written=written).answer == "yes":
                started.add(uid)
        for each in DEVICES:
            there = [reservations[uid].charges[0] for uid in started if where[uid] == each]
            assert sum(max(charge.candidates.values()) for charge in there) <= MEMORY


@given(asked, asked, st.data())
def test_two_that_are_too_much_together_never_both_may_start(
    one: int, other: int, data: st.DataObject
) -> None:
    candidates = st.lists(st.sampled_from(DEVICES), min_size=1, unique=True)
    reservations = {
        "p": reservation(one, *data.draw(candidates)),
        "q": reservation(other, *data.draw(candidates)),
    }
    sample = status(row("p", "GPU-a"), row("q", "GPU-a"))
    answers = [ask(reservations, sample, uid).answer for uid in "pq"]
    assert answers == (["no", "no"] if one + other > MEMORY else ["yes", "yes"])


class Ledger:
    def __init__(self, answer: GPUNode | Exception | None) -> None:
        self.answer = answer
        self.reads = 0

    def gpunode(self) -> GPUNode | None:
        self.reads += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_however_many_ask_the_ledger_is_read_once_a_second() -> None:
    sample, at_s = status(row("p", "GPU-a")), [10.0]
    ledger = Ledger(node({"p": reservation(1)}, sample))
    gate_service = GateService(ledger, lambda: sample, lambda: 0, lambda: at_s[0])
    assert [gate_service.ask(uid).answer for uid in ("p", "q", "p")] == ["yes", "not yet", "yes"]
    assert ledger.reads == 1
    at_s[0] += READ_EVERY_S
    gate_service.ask("p")
    assert ledger.reads == 2


@pytest.mark.parametrize("answer", [NotDelivered("rejected"), BadReport("no JSON"), None])
def test_no_pod_starts_while_the_ledger_cannot_be_read(
    answer: Exception | None,
) -> None:
    sample, at_s = status(row("p", "GPU-a")), [10.0]
    ledger = Ledger(node({"p": reservation(1)}, sample))
    gate_service = GateService(ledger, lambda: sample, lambda: 0, lambda: at_s[0])
    assert gate_service.ask("p").answer == "yes"
    ledger.answer = answer
    at_s[0] += READ_EVERY_S
    assert gate_service.ask("p").answer == "not yet"


def unknown() -> None:
    return None


@pytest.mark.parametrize(
    ("fresh", "reserve"),
    [
        pytest.param(unknown, lambda: 0, id="no fresh sample"),
        pytest.param(lambda: status(row("p", "GPU-a")), unknown, id="no annotations"),
    ],
)
def test_no_pod_starts_while_the_gate_service_lacks_data(
    fresh: Callable[[], GPUNodeStatus | None], reserve: Callable[[], int | None]
) -> None:
    ledger = Ledger(node({"p": reservation(1)}, status(row("p", "GPU-a"))))
    assert GateService(ledger, fresh, reserve, lambda: math.inf).ask("p").answer == "not yet"


def test_a_verdict_shows_nothing_about_other_pods() -> None:
    reservations = {"p": reservation(60), "secret": reservation(41, name="secret")}
    sample = status(row("p", "GPU-a"), row("secret", "GPU-a", name="secret"))
    message = msgspec.json.encode(ask(reservations, sample)).decode()
    assert "secret" not in message
    assert not any(character.isdigit() for character in message)


def certain(asked: int, uuid: str) -> Reservation:
    """A reservation of a pod whose own variable decides which device it sees."""
    charge = Charge(GPU, 1, {uuid: asked}, by_environment=True)
    return Reservation("default", "e", [charge])


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        pytest.param([], "no", id="it is charged here before it is seen"),
        pytest.param([row("e", "GPU-b")], "no", id="its replica is of another device"),
        pytest.param(
            [PodUse("e", "GPU-a", used_bytes=70)], "no", id="it uses more than its reservation"
        ),
    ],
)
def test_a_pod_whose_variable_names_this_device_certainly_uses_it(
    rows: list[PodUse], answer: str
) -> None:
    reservations = {"p": reservation(60, "GPU-a"), "e": certain(50, "GPU-a")}
    assert ask(reservations, status(row("p", "GPU-a"), *rows)).answer == answer


@pytest.mark.parametrize(
    ("used", "answer"),
    [
        pytest.param(0, "yes", id="a replica is no memory"),
        pytest.param(1, "no", id="unless it uses some"),
        pytest.param(None, "no", id="or may"),
    ],
)
def test_a_pod_whose_variable_names_another_device_only_holds_a_replica_here(
    used: int | None, answer: str
) -> None:
    reservations = {"p": reservation(60, "GPU-a"), "e": certain(50, "GPU-b")}
    assert ask(reservations, status(row("p", "GPU-a"), row("e", "GPU-a", used))).answer == answer
