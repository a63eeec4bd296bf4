"""Checks that a device is overcommitted only after a surprise, and that the extender reports it,
for any order of events.

Pods are bound, admitted in any order, reported late, end, and are deleted. The agent may stop or
write an earlier sample. The plugin restarts with another policy or none, replicas fail, pods of
other schedulers bypass the extender, and the GPUNode is recreated. The stand-in shows the memory of
each device, the state machine records the cause, and the extender's report is compared with both.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject

from headroom.contract.gpunode import GPUNodeStatus
from headroom.core.placement.prediction_outcome import Result, Surprise
from tests.examples import examples
from tests.standin.node import StandIn
from tests.standin.plugin import Settings
from tests.truth.world import Predicted, gpus, report

MEMORY_GIB = 12
REPLICAS = 4
SIZES = st.integers(1, 8)


class Machine(RuleBasedStateMachine):
    """Events that DESIGN section 5 does not list as a surprise."""

    @initialize(
        count=st.integers(2, 3),
        packed=st.booleans(),
        seed=st.integers(0, 9),
        sizes=st.lists(SIZES, max_size=6),
    )
    def start(self, count: int, packed: bool, seed: int, sizes: list[int]) -> None:
        how = Settings(REPLICAS, policy="packed", release=20) if packed else Settings(REPLICAS)
        self.node = StandIn(gpus(count, MEMORY_GIB), how, seed=seed)
        self.world = Predicted({"n": self.node})
        self.number = 0
        #: Events that can change the prediction of an unconfirmed pod.
        self.provoked: set[Surprise] = set()
        #: Pods of other schedulers.
        self.strangers: set[str] = set()
        #: Samples that an agent may write late.
        self.samples: list[GPUNodeStatus] = [report(self.node)]
        self.ended: list[str] = []
        for gib in sizes:
            uid = self.name()
            if self.world.bind(uid, gib, node="n") is not None:
                self.world.admit(uid)
            self.observe()

    def name(self) -> str:
        self.number += 1
        return f"u{self.number}"

    @property
    def waiting(self) -> list[str]:
        """Return the pods that are bound and not admitted."""
        pods = self.world.state.cluster.pods()
        return sorted(p.metadata.uid for p in pods if p.metadata.uid not in self.node.pods)

    @property
    def sitting(self) -> list[str]:
        return sorted(set(self.node.active))

    @property
    def unseen(self) -> list[str]:
        """Return the pods that are unconfirmed for the extender."""
        watched = self.world.state.cluster.observations
        return [uid for uid in self.world.sizes if watched.is_pending("n", uid)]

    @rule(gib=SIZES, containers=st.sampled_from([1, 1, 1, 2]))
    def bind(self, gib: int, containers: int) -> None:
        self.world.bind(self.name(), gib, containers, node="n")

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), worst=st.booleans(), towards=st.integers(0, 2))
    def admit(self, data: DataObject, worst: bool, towards: int) -> None:
        uid = data.draw(st.sampled_from(self.waiting), label="admitted")
        self.world.admit(uid, self.fullest if worst else f"GPU-{towards}")

    @property
    def fullest(self) -> str:
        """Return the device with the least free memory."""
        used = self.node.used_bytes()
        return max((gpu.uuid for gpu in self.node.gpus), key=lambda uuid: (used[uuid], uuid))

    @rule()
    def observe(self) -> None:
        self.world.report("n")
        self.samples.append(report(self.node))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def delete_before_admission(self, data: DataObject) -> None:
        self.world.hear_of_end(data.draw(st.sampled_from(self.waiting), label="never admitted"))

    @precondition(lambda self: self.ended)
    @rule()
    def hear_of_an_end(self) -> None:
        self.world.hear_of_end(self.ended.pop(0))

    @precondition(lambda self: self.sitting and not self.unseen)
    @rule(data=st.data())
    def end_while_no_pod_is_unconfirmed(self, data: DataObject) -> None:
        self._end(data)
        self.world.report("n")

    def _end(self, data: DataObject) -> str:
        uid = data.draw(st.sampled_from(self.sitting), label="ends")
        self.world.finish(uid, "n")
        if self.world.state.cluster.pod(uid) is not None:
            self.ended.append(uid)
        return uid

    @rule()
    def recreate_the_gpunode(self) -> None:
        """A user deletes the GPUNode, and extenders and agent create it again."""
        self.world.make_anew("n")

    def _restart(self, packed: bool) -> None:
        how = Settings(REPLICAS, policy="packed", release=20) if packed else Settings(REPLICAS)
        self.node.start_plugin(how)

    def _fail(self, data: DataObject) -> None:
        available = sorted(self.node.devices.available)
        self.node.fail(data.draw(st.sampled_from(available), label="fails"))


class Quiet(Machine):
    """Without surprises, no device is ever overcommitted and no prediction is missed."""

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        if hasattr(self, "world"):
            assert self.world.excess_bytes("n") == {}

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.report("n")
            results = {outcome.result for outcome in self.world.outcomes.values()}
            assert Result.MISS not in results


class Surprised(Machine):
    """All events may happen at any time. Each event records which predictions it can change."""

    @precondition(lambda self: self.sitting)
    @rule(data=st.data())
    def end_at_any_time(self, data: DataObject) -> None:
        self.provoked.add(Surprise.RELEASED)
        uid = self._end(data)
        if uid in self.strangers and uid not in {use.uid for use in self.reported.pods}:
            self.provoked.add(Surprise.UNKNOWN)

    @rule(packed=st.booleans())
    def restart_the_plugin(self, packed: bool) -> None:
        # The plugin also forgets which replicas were unhealthy.
        self.provoked |= {Surprise.CONFIGURATION, Surprise.HEALTH}
        if _plugin(self.reported) != _plugin(report(self.node)):
            self.provoked.add(Surprise.UNKNOWN)
        self._restart(packed)

    @property
    def reported(self) -> GPUNodeStatus:
        """Return the last report. It does not show a change that is undone before the next
        report.
        """
        held = self.world.state.cluster.gpunode("n")
        assert held is not None
        assert held.status is not None
        return held.status

    @precondition(lambda self: self.node.devices.available)
    @rule(data=st.data())
    def fail(self, data: DataObject) -> None:
        self.provoked.add(Surprise.HEALTH)
        self._fail(data)

    @precondition(lambda self: self.node.devices.available)
    @rule(gib=st.integers(1, 3), heard_of=st.booleans())
    def bypass(self, gib: int, heard_of: bool) -> None:
        self.provoked.add(Surprise.BYPASS)
        uid = self.name()
        self.strangers.add(uid)
        self.world.bypass(uid, gib, "n")
        if heard_of:
            self.world.hear_of(uid, "n")

    @precondition(lambda self: self.sitting)
    @rule(data=st.data(), gib=SIZES, what=st.sampled_from(["end", "fail", "bypass", "restart"]))
    def cause_a_surprise_before_admission(self, data: DataObject, gib: int, what: str) -> None:
        """Do all steps that a surprise needs, in order, because they rarely occur together."""
        self.observe()
        uid = self.name()
        if self.world.bind(uid, gib, node="n") is None:
            return
        if what == "end":
            self.end_at_any_time(data)
        elif what == "restart":
            self.restart_the_plugin(packed=data.draw(st.booleans()))
        elif self.node.devices.available:
            self.fail(data) if what == "fail" else self.bypass(1, heard_of=data.draw(st.booleans()))
        self.world.admit(uid, self.fullest)

    @precondition(lambda self: len(self.samples) > 1)
    @rule(data=st.data())
    def write_an_earlier_sample(self, data: DataObject) -> None:
        """Write an earlier sample, as a restarted or slow agent does.

        The extender then places pods by an outdated report, and the result looks like a surprise.
        """
        self.provoked |= set(Surprise) - {Surprise.UNKNOWN}
        sample = data.draw(st.sampled_from(self.samples[-3:]), label="old sample")
        self.world.store.report([("n", sample)])
        self.world.look()

    @invariant()
    def overcommitment_is_recognised(self) -> None:
        """Check that overcommitment is recognised once a report shows the pods."""
        if not hasattr(self, "world"):
            return
        over = self.world.excess_bytes("n")
        if not over:
            return
        self.observe()
        terms = {t.device.uuid: t for t in self.world.state.cluster.snapshot().nodes[0].devices}
        for uuid, excess_bytes in over.items():
            assert terms[uuid].headroom_bytes <= -excess_bytes
            there = {uid for uid, _ in self.node.processes} & self.on(uuid)
            missed = {o.uid for o in self.world.misses if uuid in o.observed}
            assert there & (missed | self.strangers | self.world.lost), (uuid, there)

    def on(self, uuid: str) -> set[str]:
        return {p.uid for p in self.node.processes.values() if uuid in p.used_bytes}

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.report("n")
        # Every miss has a surprise of a kind that was provoked.
        named = {outcome.surprise for outcome in self.world.misses}
        several = {Surprise.SEVERAL} if len(self.provoked) > 1 else set()
        assert named <= self.provoked | several, (named, self.provoked)


def _plugin(status: GPUNodeStatus) -> tuple[object, ...]:
    """Return the surprises that a restart of the plugin can cause in a report."""
    return status.plugin.allocation_policy, [each.replicas.unhealthy for each in status.devices]


for machine in (Quiet, Surprised):
    machine.TestCase.settings = settings(
        max_examples=examples(150), stateful_step_count=25, deadline=None
    )
TestQuiet = Quiet.TestCase
TestSurprised = Surprised.TestCase
