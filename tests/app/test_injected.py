"""An exception at any await or callback of the state, the controllers and the ledger stops nothing
for ever: the life of a cluster goes on to its end, and the exception is counted or returned."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.controlplane import ROOT

pytestmark = pytest.mark.slow

#: Which calls of each point raise.
CALLS = os.environ.get("TEST_INJECTED_CALLS", "1").split(",")
#: Points that the life of ``tests.app.life`` may not come to, with the reason.
NOT_REACHED = {
    "is compared or iterated, not called": {
        "extender.state.event_queue:EventQueue._react: called self.reactions",
        "extender.controllers.event_recorder:EventRecorder.writes: called self._post",
    },
    "goes on after another exception only": {
        "extender.periodic:Loops.keep.kept: waited await asyncio.sleep(AGAI",
        "extender.periodic:Loops.failing: called self._failures_of",
    },
    "belongs to other processes or to tests": {
        "extender.ledger.initialise:one_by_one: waited await call",
        "extender.app.cluster_view:ClusterView._collect: waited await self.begun.wait()",
        "extender.app.cluster_view:ClusterView._collect: waited await collect_garbage()",
        "extender.state.event_queue:EventQueue.idle: waited await self._idle.wait()",
        "extender.controllers.reconcile:ReconcileController.once: waited await self.check_reserva",
        "extender.controllers.reconcile:ReconcileController.once: waited await self.prepare_nodes",
        "extender.controllers.reconcile:ReconcileController.once: waited await self.record_events",
    },
    "is handed to a port of HTTP, which answers with 500": {
        "extender.app.cluster_view:ClusterView.context: called quotas",
        "extender.observability.fleet_metrics:FleetCollector._holdings: called self._held",
        "extender.observability.fleet_metrics:FleetCollector._pending_pods: called self._pending",
    },
    "takes a race or a list that is not played here": {
        "extender.ledger.bind:Binder._fit_without_gpunode: waited await self._store.read_p",
        "extender.ledger.bind:Binder._reserve: waited await self._reserve(node",
        "extender.ledger.bind:Binder._reserve_together: waited await self._fit_without_",
        "extender.ledger.ledger:Ledger.requeue: waited await self._store.read_p",
        "extender.periodic:Loops._run.moved: called self._monotonic_s",
        "extender.controllers.preemption:PreemptionController._record_nominations: "
        "waited await self._record(pod, ",
    },
}
#: Other points that one run in many does not reach: it depends on the order of events.
MOST_LEFT_TO_CHANCE = 8


def played(call: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.app.injection", call],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("call", CALLS)
def test_the_life_of_a_cluster_goes_on_after_any_exception(call: str) -> None:
    plays = played(call)
    assert [play for play in plays if play["missing"]] == []
    reached = {play["point"] for play in plays if play["reached"]}
    assert [play for play in plays if play["reached"] and not play["failures"]] == []
    if call == "1":
        named = set().union(*NOT_REACHED.values())
        others = {play["point"] for play in plays} - reached - named
        assert len(others) <= MOST_LEFT_TO_CHANCE, others
