"""Simulates a node on which pods are bound, admitted in any order, reported late, and end.

The tests use the kubelet and the device plugin from ``brute``. The extender sees only the last
report and which pods the API server shows as running. If devices are predicted, unexpected events
happen only while no pod is unconfirmed. If the pod must fit on every device, they can happen at any
time.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject

from headroom.contract.gpunode import Plugin, PodUse, Replicas, Reservation
from headroom.contract.kube import Container
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import place
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import FRESH_S, GIB, NOW_S, container, pod, request, shared, terms
from tests.examples import examples
from tests.judge import excess
from tests.placement import brute

MEMORY = 12
REPLICAS = 4


@dataclass
class Running:
    """A bound pod with one container. Sizes are in GiB."""

    sizes: tuple[int, ...]
    #: GPU of each container after admission.
    where: list[int] = field(default_factory=list)
    #: Whether the API server shows that it is ending or has ended.
    ending: bool = False
    #: GPUs that the pod's own variable names, or None if the plugin decides.
    sees: frozenset[int] | None = None

    def loads(self) -> Iterator[tuple[int, int]]:
        """Return (GPU, GiB) of each container that can use memory after admission."""
        for size, given in zip(self.sizes, self.where, strict=False):
            for index in self.sees or (given,):
                yield index, size


@dataclass(frozen=True)
class Report:
    policy: str
    taken: tuple[int, ...]
    rows: tuple[PodUse, ...]


class Churn(RuleBasedStateMachine):
    #: Whether the report shows the plugin's policy.
    policy_known = True
    wishes = Rules()
    #: Whether reports show that pods use the devices of their own variable.
    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, Running] = {}
        self.reservations: dict[str, Reservation] = {}
        self.number = 0
        self.policy = "distributed"
        self.gpus = 2
        self.report = Report(self.policy, (), ())

    @initialize(gpus=st.integers(2, 3), policy=st.sampled_from(["distributed", "packed"]))
    def start(self, gpus: int, policy: str) -> None:
        self.gpus, self.policy = gpus, policy
        self.observe()

    @property
    def waiting(self) -> list[str]:
        return [uid for uid, one in self.pods.items() if not one.where]

    @property
    def sitting(self) -> list[str]:
        return [uid for uid, one in self.pods.items() if one.where]

    def taken(self) -> Counter[int]:
        return Counter(index for one in self.pods.values() for index in one.where)

    @rule(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=2))
    def bind(self, sizes: list[int]) -> None:
        self.try_to_bind(sizes, [container(f"c{number}") for number in range(len(sizes))])

    def try_to_bind(self, sizes: list[int], containers: list[Container]) -> None:
        text = ",".join(f"c{number}={size}Gi" for number, size in enumerate(sizes))
        asked = request(pod(text, *containers), rules=self.wishes)
        devices = [
            shared(
                f"D{index}",
                memory_bytes=MEMORY * GIB,
                replicas=Replicas(free=REPLICAS - taken, allocated=taken),
            )
            for index, taken in enumerate(self.report.taken)
        ]
        running = {uid for uid, one in self.pods.items() if not one.ending}
        weighed = terms(
            *devices,
            pods=self.report.rows,
            reservations=self.reservations,
            leaving={row.uid for row in self.report.rows} - running,
            plugin=Plugin(
                allocation_policy=self.report.policy if self.policy_known else "unknown",  # type: ignore[arg-type]
                topology_manager_policy="none",
            ),
        )
        snap = build([NodeTerms("n", None, FRESH_S, weighed)])
        verdicts = fit(asked, snap, snap.rows(["n"]), NOW_S)
        if verdicts.fits[0]:
            self.number += 1
            uid = f"u{self.number}"
            charges = place(asked, snap, verdicts, 0).charges
            self.reservations[uid] = Reservation("default", uid, charges=list(charges))
            (charge,) = charges
            sees = frozenset(int(uuid[1:]) for uuid in charge.candidates)
            self.pods[uid] = Running(tuple(sizes), sees=sees if charge.by_environment else None)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: DataObject) -> None:
        one = self.pods[data.draw(st.sampled_from(self.waiting), label="admitted")]
        for _ in one.sizes:
            available = [REPLICAS - self.taken()[index] for index in range(self.gpus)]
            could = brute.answers([REPLICAS] * self.gpus, available, self.policy)
            one.where.append(data.draw(st.sampled_from(sorted(could)), label="given"))

    @rule()
    def observe(self) -> None:
        """Let the agent report, and remove reservations of pods that ended before."""
        taken = self.taken()
        rows = [
            self.row(uid, index, number)
            for uid, one in self.pods.items()
            for number, index in enumerate(one.where)
        ]
        for uid, one in self.pods.items():
            rows += [
                PodUse(uid=uid, device=f"D{index}", used_bytes=1)
                for index in one.sees or ()
                if one.where and self.uses
            ]
        counts = tuple(taken[index] for index in range(self.gpus))
        self.report = Report(self.policy, counts, tuple(rows))
        for uid in self.reservations.keys() - self.pods.keys():
            del self.reservations[uid]

    def row(self, uid: str, index: int, number: int) -> PodUse:
        return PodUse(uid=uid, device=f"D{index}", replica=f"{uid}-{number}")

    @precondition(lambda self: self.sitting and not self.waiting)
    @rule(data=st.data(), at_once=st.booleans())
    def end(self, data: DataObject, at_once: bool) -> None:
        """Delete the pod, or let it end by itself, which frees its replica immediately."""
        uid = data.draw(st.sampled_from(self.sitting), label="ends")
        self.pods[uid].ending = True
        if at_once:
            del self.pods[uid]

    @precondition(lambda self: any(one.ending for one in self.pods.values()))
    @rule(data=st.data())
    def let_go(self, data: DataObject) -> None:
        ending = [uid for uid, one in self.pods.items() if one.ending]
        del self.pods[data.draw(st.sampled_from(ending), label="let go")]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def delete_before_admission(self, data: DataObject) -> None:
        del self.pods[data.draw(st.sampled_from(self.waiting), label="never admitted")]

    @precondition(lambda self: not (self.policy_known and self.waiting))
    @rule(policy=st.sampled_from(["distributed", "packed"]))
    def restart_the_plugin(self, policy: str) -> None:
        self.policy = policy
        if self.policy_known:
            self.observe()

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        loads = (load for one in self.pods.values() for load in one.loads())
        assert excess(loads, dict.fromkeys(range(self.gpus), MEMORY)) == {}


class ChurnIfUnknown(Churn):
    policy_known = False


TestPredicted = Churn.TestCase
TestPredicted.settings = settings(max_examples=examples(150), stateful_step_count=25, deadline=None)
TestIfUnknown = ChurnIfUnknown.TestCase
TestIfUnknown.settings = settings(max_examples=examples(100), stateful_step_count=25, deadline=None)
