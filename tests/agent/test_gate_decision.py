"""Checks that two gated pods that are too large for their common device never both start."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gate_decision import Limits, Verdict, judge
from headroom.contract.gpunode import (
    EVICTED,
    Charge,
    GPUNodeStatus,
    PodUse,
    Replicas,
    Reservation,
    Source,
)
from tests.agent.gate_node import (
    DEVICES,
    GPU,
    MEMORY,
    ask,
    device,
    node,
    reservation,
    row,
    status,
    stray,
)


def test_a_pod_reserved_on_its_device_may_start() -> None:
    assert ask({"p": reservation(100)}, status(row("p", "GPU-a"))) == Verdict("yes")


def test_a_pod_on_an_unpredicted_device_counts_there() -> None:
    here = status(row("p", "GPU-a"), row("q", "GPU-a"))
    reservations = {"p": reservation(60, "GPU-b"), "q": reservation(40, "GPU-a")}
    assert ask(reservations, here).answer == "yes"
    reservations["q"] = reservation(41, "GPU-a")
    assert ask(reservations, here) == Verdict(
        "no", "the device of this pod does not have enough free memory"
    )
    # When one of the pods is deleted, the other pod may start.
    assert ask(reservations, status(row("p", "GPU-a"))).answer == "not yet"  # q is unconfirmed.
    del reservations["q"]
    assert ask(reservations, status(row("p", "GPU-a"))).answer == "yes"


@pytest.mark.parametrize(
    ("sample", "more"),
    [
        pytest.param(status(), {}, id="the kubelet has not admitted it"),
        pytest.param(status(row("q", "GPU-a")), {}, id="another pod of that name"),
        pytest.param(
            status(PodUse("p", "GPU-a", used_bytes=1)), {}, id="it exists but holds no replica"
        ),
        pytest.param(status(row("p", "GPU-z")), {}, id="unknown device"),
        pytest.param(
            status(row("p", "GPU-a")), {"initialised": False}, id="the ledger is not ready"
        ),
        pytest.param(
            status(row("p", "GPU-a")), {"written": status()}, id="the report is not written yet"
        ),
        pytest.param(
            status(row("p", "GPU-a")),
            {"written": status(row("p", "GPU-b"))},
            id="the written report shows another device",
        ),
        pytest.param(
            status(row("p", "GPU-a"), sources=[Source("checkpoint", "degraded")]),
            {},
            id="unknown replicas of pods",
        ),
        pytest.param(
            status(row("p", "GPU-a"), devices=[device("GPU-a", memory_bytes=-1)]),
            {},
            id="unknown memory",
        ),
    ],
)
def test_a_pod_waits_while_inputs_are_unknown(sample: GPUNodeStatus, more: dict[str, Any]) -> None:
    assert ask({"p": reservation(1)}, sample, **more).answer == "not yet"


def test_a_pod_without_a_reservation_waits() -> None:
    assert ask({}, status(row("p", "GPU-a"))).answer == "not yet"


def test_a_pod_waits_until_it_holds_all_reserved_devices() -> None:
    reservations = {"p": reservation(10, count=2)}
    assert ask(reservations, status(row("p", "GPU-a"))).answer == "not yet"
    # One replica has two rows, because an app container reuses the init container's replica.
    twice = status(row("p", "GPU-a", container="i"), row("p", "GPU-a", container="m"))
    assert ask(reservations, twice).answer == "not yet"
    assert ask(reservations, status(row("p", "GPU-a"), row("p", "GPU-b"))).answer == "yes"


def test_with_several_devices_the_worst_one_decides() -> None:
    both = status(row("p", "GPU-a"), row("p", "GPU-b"), row("q", "GPU-b"))
    reservations = {"p": reservation(60, count=2), "q": reservation(41)}
    assert ask(reservations, both).answer == "no"


def test_a_set_of_devices_counts_on_the_devices_that_the_pod_got() -> None:
    devices = [device(uuid) for uuid in (*DEVICES, "GPU-c")]

    def sample(*uuids: str) -> GPUNodeStatus:
        return status(*(row("p", uuid) for uuid in uuids), row("q", "GPU-c"), devices=devices)

    def of_set(asked: int) -> Reservation:
        charge = Charge(GPU, 2, dict.fromkeys(DEVICES, asked), choices=list(DEVICES))
        return Reservation("default", "p", [charge])

    beside = {"q": reservation(41, "GPU-c")}
    pair = beside | {"p": of_set(60)}
    assert ask(pair, sample("GPU-a")).answer == "not yet"
    assert ask(pair, sample("GPU-a", "GPU-b")).answer == "yes"
    # After a restart of the plugin, the pod can get a device outside its set.
    assert ask(pair, sample("GPU-a", "GPU-c")).answer == "no"
    # Another pod with the same set is unconfirmed.
    assert ask(pair | {"r": of_set(41)}, sample("GPU-a", "GPU-b")).answer == "not yet"
    assert ask(pair | {"r": of_set(40)}, sample("GPU-a", "GPU-b")).answer == "yes"


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        pytest.param({"healthy": False}, "no", id="unhealthy"),
        pytest.param({"compute_mode": "prohibited"}, "no", id="prohibited compute mode"),
        pytest.param({"compute_mode": "exclusive-process"}, "no", id="exclusive compute mode"),
        pytest.param(
            {"compute_mode": "exclusive-process", "sharing": "mps"},
            "yes",
            id="exclusive for the MPS server",
        ),
        pytest.param(
            {"compute_mode": "exclusive-process", "sharing": "none"},
            "yes",
            id="exclusive for a pod",
        ),
    ],
)
def test_no_pod_starts_on_a_device_that_takes_no_pods(state: dict[str, Any], answer: str) -> None:
    sample = status(row("p", "GPU-a"), devices=[device("GPU-a", **state)])
    assert ask({"p": reservation(1)}, sample).answer == answer


@pytest.mark.parametrize(
    ("room", "sample"),
    [
        pytest.param(30, status(row("p", "GPU-a"), stray(70)), id="use of an unreserved pod"),
        pytest.param(
            30,
            status(row("p", "GPU-a"), devices=[device("GPU-a", unattributed_bytes=70)]),
            id="process without a pod",
        ),
        pytest.param(
            30,
            status(row("p", "GPU-a", None), stray(None),
                   devices=[device("GPU-a", unattributed_bytes=None, used_bytes=100)]),
            id="use is not attributed: that of the pod itself is unknown",
        ),
    ],
)  # fmt: skip
def test_unreserved_use_reduces_the_free_memory(room: int, sample: GPUNodeStatus) -> None:
    assert ask({"p": reservation(room)}, sample).answer == "yes"
    if sample.devices[0].unattributed_bytes is not None:
        assert ask({"p": reservation(room + 1)}, sample).answer == "no"
        assert ask({"p": reservation(room)}, sample, reserve=1).answer == "no"


def test_a_little_unattributed_use_is_ignored() -> None:
    sample = status(row("p", "GPU-a"), devices=[device("GPU-a", unattributed_bytes=8)])
    assert ask({"p": reservation(100)}, sample, tolerance=8).answer == "yes"
    assert ask({"p": reservation(100)}, sample, tolerance=7).answer == "no"


def test_a_neighbour_without_measured_use_counts_with_its_reservation() -> None:
    nameless = PodUse("", "GPU-a", "default", "q", replica="GPU-a::1")
    sample = status(row("p", "GPU-a"), nameless)
    assert ask({"p": reservation(60), "q": reservation(41, name="q")}, sample).answer == "no"


def test_no_pod_starts_next_to_a_pod_without_a_reservation() -> None:
    """The pod must wait, because the future use of the other pod is unknown."""
    beside = status(row("p", "GPU-a"), row("bypass", "GPU-a"))
    assert ask({"p": reservation(10)}, beside).answer == "not yet"
    elsewhere = status(row("p", "GPU-a"), row("bypass", "GPU-b"))
    assert ask({"p": reservation(10)}, elsewhere).answer == "yes"
    adopted = {"p": reservation(10), "bypass": reservation(90)}
    assert ask(adopted, beside).answer == "yes"
    assert ask(adopted | {"bypass": reservation(91)}, beside).answer == "no"


def test_a_static_neighbour_is_identified_by_its_name() -> None:
    """The kubelet identifies a static pod by the hash of its manifest, but the API server gives it
    another UID.
    """
    static = row("0" * 32, "GPU-a", namespace="default", name="q")
    sample = status(row("p", "GPU-a"), static)
    assert ask({"p": reservation(60), "u": reservation(40, name="q")}, sample).answer == "yes"
    assert ask({"p": reservation(60), "u": reservation(41, name="q")}, sample).answer == "no"
    assert ask({"p": reservation(60)}, sample).answer == "not yet"


def test_a_pod_marked_for_eviction_does_not_start() -> None:
    """The pod does not start even if enough memory has become free."""
    leaves = msgspec.structs.replace(reservation(10), flags=[EVICTED])
    assert ask({"p": leaves}, status(row("p", "GPU-a"))).answer == "no"


def test_instances_that_share_memory_are_added_up() -> None:
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
    """Draw a sequence of states in which pods are bound, admitted and deleted."""
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
def test_started_pods_never_request_more_memory_than_a_device_has(
    story: list[tuple[dict[str, Reservation], GPUNodeStatus]], chance: Any
) -> None:
    """This must hold for outdated reservations and for any order of requests."""
    started: set[str] = set()
    for now, (reservations, sample) in enumerate(story):
        where = {use.uid: use.device for use in sample.pods}
        started &= where.keys()
        asking = sorted(where)
        chance.shuffle(asking)
        for uid in asking:
            # Use older reservations, because the agent may have read them a moment ago.
            old = chance.randrange(max(0, now - 1), now + 1)
            then, written = story[old]
            if ask(then, sample, uid, written=written).answer == "yes":
                started.add(uid)
        for each in DEVICES:
            there = [reservations[uid].charges[0] for uid in started if where[uid] == each]
            assert sum(max(charge.candidates.values()) for charge in there) <= MEMORY


@given(asked, asked, st.data())
def test_two_pods_that_are_too_large_together_never_both_start(
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


def certain(asked: int, uuid: str) -> Reservation:
    """Return a reservation of a pod that sees its devices through an environment variable of its
    own.
    """
    charge = Charge(GPU, 1, {uuid: asked}, by_environment=True)
    return Reservation("default", "e", [charge])


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        pytest.param([], "no", id="charged before its use is seen"),
        pytest.param([row("e", "GPU-b")], "no", id="its replica belongs to another device"),
        pytest.param(
            [PodUse("e", "GPU-a", used_bytes=70)], "no", id="it uses more than it reserved"
        ),
    ],
)
def test_a_pod_whose_variable_names_this_device_counts_here(
    rows: list[PodUse], answer: str
) -> None:
    reservations = {"p": reservation(60, "GPU-a"), "e": certain(50, "GPU-a")}
    assert ask(reservations, status(row("p", "GPU-a"), *rows)).answer == answer


@pytest.mark.parametrize(
    ("used", "answer"),
    [
        pytest.param(0, "yes", id="it uses no memory here"),
        pytest.param(1, "no", id="it uses memory here"),
        pytest.param(None, "no", id="it may use memory here"),
    ],
)
def test_a_pod_whose_variable_names_another_device_only_holds_a_replica_here(
    used: int | None, answer: str
) -> None:
    reservations = {"p": reservation(60, "GPU-a"), "e": certain(50, "GPU-b")}
    assert ask(reservations, status(row("p", "GPU-a"), row("e", "GPU-a", used))).answer == answer


class TestCordonedDevices:
    def cordoned(self, held: Reservation, **more: Any) -> str:
        asking = node({"p": held}, status(row("p", "GPU-a"), **more))
        spec = msgspec.structs.replace(asking.spec, cordoned=["GPU-a"])
        assert asking.status is not None
        closed = msgspec.structs.replace(asking, spec=spec)
        return judge(closed, asking.status, "p", Limits(0, 0)).answer

    def test_a_pod_that_was_placed_elsewhere_does_not_start_there(self) -> None:
        assert ask({"p": reservation(10, "GPU-b")}, status(row("p", "GPU-a"))).answer == "yes"
        assert self.cordoned(reservation(10, "GPU-b")) == "no"

    def test_a_pod_that_was_placed_there_before_the_cordon_starts(self) -> None:
        assert self.cordoned(reservation(10, "GPU-a")) == "yes"

    def test_a_pod_of_another_scheduler_does_not_start_there(self) -> None:
        adopted = msgspec.structs.replace(reservation(10, "GPU-a"), flags=["adopted"])
        assert self.cordoned(adopted) == "no"

    def test_the_cordon_of_a_gpu_covers_its_mig_devices(self) -> None:
        mig = (device("GPU-x", parent="GPU-a"), device("GPU-b"))
        asking = node({"p": reservation(10, "GPU-b")}, status(row("p", "GPU-x"), devices=mig))
        closed = msgspec.structs.replace(
            asking, spec=msgspec.structs.replace(asking.spec, cordoned=["GPU-a"])
        )
        assert asking.status is not None
        assert judge(asking, asking.status, "p", Limits(0, 0)).answer == "yes"
        assert judge(closed, asking.status, "p", Limits(0, 0)).answer == "no"
