"""Explores every order of events, with all rules of DESIGN section 6 and without each rule.

To limit the exploration, the protocol retries at most ``attempts`` times instead of 8 times. This
is its only change. The exploration visits about 400,000 states and a million steps in half a
minute.
"""

import functools
import itertools
import logging
from collections.abc import Mapping

import pytest

from headroom.contract.kube import Pod
from headroom.core.placement import fit
from tests.ledger.store_behaviour import Stage, StoreBehaviour
from tests.model import cluster
from tests.model.cluster import pod as some_pod
from tests.model.cluster import protocol_with, wrong_with
from tests.model.explorer import explore
from tests.model.scenarios import PLAYS
from tests.model.world import World, WorldStore, changed

pytestmark = pytest.mark.slow

#: Logs the number of explored states. ``--log-cli-level=info`` shows it.
log = logging.getLogger(__name__)


def attempts(number: int) -> dict[str, str]:
    return {"ATTEMPTS = 8": f"ATTEMPTS = {number}"}


@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize(
    ("tries", "losses"),
    [
        pytest.param(2, 1, id="one lost call"),
        pytest.param(3, 0, id="more attempts and no lost call"),
    ],
)
def test_reservations_hold_in_every_order_of_events(play: str, tries: int, losses: int) -> None:
    explored = explore(PLAYS[play](protocol_with(attempts(tries)), losses), wrong_with)
    log.info("%s: %s", play, explored)
    assert not explored.wrong, explored
    assert explored.states > 100


@pytest.mark.parametrize(
    "play", ["two pods for one device", "one pod on two nodes", "a request that grows"]
)
def test_no_memory_is_reserved_twice_when_two_responses_are_lost(play: str) -> None:
    explored = explore(PLAYS[play](protocol_with(attempts(2)), 2), wrong_with)
    log.info("%s: %s", play, explored)
    assert not explored.wrong, explored


_TOUCHES = "                        await self.store.touch_pod(pod, self.new_id())\n"
RULES_DROPPED: Mapping[str, tuple[str, str]] = {
    "the pod is not read again if it has a reservation": (
        "if pod is None or request.uid in gpunode.spec.reservations:",
        "if pod is None:",
    ),
    "the Binding is sent without a reservation": (
        "elif placement.charges:",
        "elif not placement.charges:",
    ),
    "the Binding is sent before the reservation is written": (
        "            if pending.reservation is not None:\n",
        "            if isinstance(pending.step, _Reserved):\n"
        "                await self._store.bind("
        "_binding(pending.step.pod, node, pending.step.placement))\n"
        "            if pending.reservation is not None:\n",
    ),
    "an existing reservation is not written again": (
        "            if pending.reservation is not None:\n",
        "            held_already = pending.request.uid in gpunode.spec.reservations\n"
        "            if pending.reservation is not None and not held_already:\n",
    ),
    "the reservation has no ID and no time of its attempt": (
        "attempt=self.new_id(), since=since)",
        'attempt="always", since="always")',
    ),
    "the reservation is written without the resourceVersion": (
        "        after = await self.store.write_spec(before, spec)\n",
        "        unguarded = msgspec.structs.replace(before.metadata, resource_version='*')\n"
        "        before = msgspec.structs.replace(before, metadata=unguarded)\n"
        "        after = await self.store.write_spec(before, spec)\n",
    ),
    "a conflicting write of a reservation counts as written": (
        "            except (StoreConflict, StoreNotFound, OutcomeUnknown) as err:\n"
        "                error = err\n",
        "            except (StoreConflict, StoreNotFound, OutcomeUnknown):\n"
        "                pass\n",
    ),
    "the Binding has no resourceVersion": (
        "resource_version=pod.metadata.resource_version,",
        'resource_version="*",',
    ),
    "a failed bind removes its reservation": (
        "            # 5. The Binding was rejected or not answered, so the pod's current state "
        "decides.\n",
        "            gpunode = await self._store.read_gpunode(request.node)\n"
        "            rest = {**gpunode.spec.reservations}\n"
        "            rest.pop(request.uid, None)\n"
        "            spec = msgspec.structs.replace(gpunode.spec, reservations=rest)\n"
        "            gpunode = await self._reservations.write(gpunode, spec)\n",
    ),
    "removal does not read the pod": (
        "                pod = await self.store.read_pod("
        "reservation.namespace, reservation.name)\n",
        "                pod = None\n",
    ),
    "removal does not touch an unbound pod": (
        _TOUCHES + "                elif",
        "                        pass\n                elif",
    ),
    "removal continues after a conflict of the touch": (
        _TOUCHES + "                elif",
        "                        try:\n"
        "                            await self.store.touch_pod(pod, self.new_id())\n"
        "                        except StoreConflict:\n"
        "                            pass\n"
        "                elif",
    ),
    "each touch writes the same value": (
        _TOUCHES + "                elif",
        _TOUCHES.replace("self.new_id()", "'touched'") + "                elif",
    ),
    "removal reads the GPUNode again after the touch": (
        "                rest = {u: r for u, r in gpunode.spec",
        "                gpunode = await self.store.read_gpunode(node)\n"
        "                rest = {u: r for u, r in gpunode.spec",
    ),
    "removal keeps the reservation of an ended pod": (
        "if pod.node == node and not pod.ended:",
        "if pod.node == node:",
    ),
    "removal treats a missing pod like a pod that has left": (
        "elif not left or _shown(gpunode, uid):",
        "elif _shown(gpunode, uid):",
    ),
    "removal confuses the pod with its successor of the same name": (
        "if pod is not None and pod.metadata.uid == uid:",
        "if pod is not None:",
    ),
    "removal keeps the reservation of an unbound pod": (
        "if pod.node == node and not pod.ended:",
        "if not pod.ended:",
    ),
    "initialisation does not touch unbound pods": (
        "            await self._store.touch_pod(pod, self._new_id())\n"
        "        except (StoreConflict",
        "            pass\n        except (StoreConflict",
    ),
    "initialisation ignores a touch with an unknown outcome": (
        '        except StoreRejected as err:\n            log.warning("pod_not_touched',
        '        except StoreError as err:\n            log.warning("pod_not_touched',
    ),
    "initialisation lists the bound pods before it touches unbound pods": (
        "part_by_part(await self._store.list_pods(name), AT_ONCE)",
        "part_by_part(early, AT_ONCE)",
    ),
    "initialisation charges no pod": (
        "reservations[pod.metadata.uid] = stamped",
        "pass",
    ),
    "a pod that starts alone is reserved like any other": (
        "            pending.reservation = placement.reservation(",
        "            placement = Placement(placement.charges, placement.annotations)\n"
        "            pending.reservation = placement.reservation(",
    ),
    "the end of a start is written without the resourceVersion": (
        "            with suppress(StoreConflict, StoreNotFound):\n"
        "                await self.write(gpunode, started)\n",
        "            held = msgspec.structs.replace(gpunode.metadata, resource_version='*')\n"
        "            gpunode = msgspec.structs.replace(gpunode, metadata=held)\n"
        "            with suppress(StoreConflict, StoreNotFound):\n"
        "                await self.write(gpunode, started)\n",
    ),
    "a pod bound by another scheduler is charged only in memory": (
        "                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)\n",
        "                return True\n",
    ),
    "a pod bound by another scheduler is charged without the resourceVersion": (
        "                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)\n",
        "                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)\n"
        "                held = msgspec.structs.replace(gpunode.metadata, resource_version='*')\n"
        "                gpunode = msgspec.structs.replace(gpunode, metadata=held)\n",
    ),
}
#: This mutant also needs a change where the pods are listed.
_LISTS_TOO_EARLY = {
    "        # Bindings in flight have their reservations": (
        "        early = await self._store.list_pods()\n"
        "        # Bindings in flight have their reservations"
    )
}


def test_the_model_notices_that_fit_ignores_starting_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "_meets_starting", lambda *_: None)
    monkeypatch.setattr(cluster, "_fitted", {})
    explored = explore(PLAYS["pods that start alone"](protocol_with(attempts(2)), 0), wrong_with)
    assert explored.wrong == "on n1 these pods start at the same time: ['p', 'q']"


#: Rules whose absence only the scenarios of starting pods reveal.
_OF_STARTS = (
    "a pod that starts alone is reserved like any other",
    "the end of a start is written without the resourceVersion",
)


#: Scenarios are explored until one reveals the missing rule. For these rules, the given number of
#: lost calls and scenario are explored first, because other scenarios take long.
_FOUND_IN = {
    "initialisation ignores a touch with an unknown outcome": (1, "the gpunode is lost"),
}


@pytest.mark.parametrize("dropped", RULES_DROPPED)
def test_the_model_notices_a_dropped_rule(dropped: str) -> None:
    changes = dict([RULES_DROPPED[dropped]]) | attempts(2)
    if "lists the bound pods before" in dropped:
        changes |= _LISTS_TOO_EARLY
    code = protocol_with(changes)
    judge = functools.partial(wrong_with, code=code)
    plays = [name for name in PLAYS if (dropped in _OF_STARTS) == ("start" in name)]
    first = _FOUND_IN.get(dropped)
    for losses, name in sorted(itertools.product((0, 1), plays), key=lambda each: each != first):
        explored = explore(PLAYS[name](code, losses), judge)
        if explored.wrong and len(explored.story) <= 13:
            log.info("%s: %s, %d steps: %s", dropped, name, len(explored.story), explored)
            return
    pytest.fail(f"no scenario shows in 13 steps that {dropped}")


class WorldStage:
    """A stage with the model's server, which must pass the tests of every store."""

    def __init__(self) -> None:
        self.store = self._world = WorldStore(World())
        self._numbers = itertools.count()

    def new_name(self) -> str:
        return f"x{next(self._numbers)}"

    def new_pod(self, name: str, annotations: Mapping[str, str]) -> Pod:
        made = some_pod(name, 6, uid=f"uid-{next(self._numbers)}")
        made = changed(made, metadata=changed(made.metadata, annotations=annotations))
        self._world.world = self._world.world.with_pod(made)
        return self._world.world.pods[name]

    def delete_pod(self, pod: Pod) -> None:
        self._world.world = self._world.world.without_pod(pod.metadata.name)

    def delete_gpunode(self, name: str) -> None:
        self._world.world = self._world.world.without_gpunode(name)


class TestWorldIsAStore(StoreBehaviour):
    @pytest.fixture
    def stage(self) -> Stage:
        return WorldStage()
