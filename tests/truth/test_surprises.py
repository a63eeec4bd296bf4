"""Provokes each event that can change a prediction between binding and admission.

The node has two GPUs with 24 GiB and four replicas each. GPU-1 holds a large pod and GPU-0 is
empty, so the next pod is predicted on GPU-0. Then something happens before it is admitted. The
stand-in node shows whether a device is overcommitted, and the extender's result is compared with
it.
"""

from collections.abc import Callable

import pytest

from headroom.core.placement.prediction_outcome import Result, Surprise
from tests.driver import GIB
from tests.standin.node import StandIn
from tests.standin.plugin import Settings
from tests.truth.world import Predicted, gpus


def node_with_a_large_pod(choice: str = "predicted", small_on_1: int = 0) -> Predicted:
    """A node with a pod of 20 GiB on GPU-1, and ``small_on_1`` pods of 1 GiB on each GPU."""
    world = Predicted({"n": StandIn(gpus(2), Settings(4))}, choice)
    for uid, gib, gpu in [
        ("large", 20, 1),
        *((f"small-{n}-{gpu}", 1, gpu) for n in range(small_on_1) for gpu in (0, 1)),
    ]:
        world.bind(uid, gib, node="n")
        # The first pod may get either GPU. After that, pods alternate, because the other GPU is
        # emptier.
        world.admit(uid, towards=f"GPU-{gpu}")
        world.report("n")
    return world


def released(world: Predicted) -> None:
    """Two pods of GPU-1 end by themselves."""
    for uid in ("small-0-1", "small-1-1"):
        world.finish(uid, "n")


def unhealthy(world: Predicted) -> None:
    """Two replicas of GPU-0 turn unhealthy."""
    for replica in sorted(free_replicas(world, "GPU-0"))[:2]:
        world.nodes["n"].fail(replica)


def bypassed(world: Predicted) -> None:
    """Two pods bound by another scheduler are admitted first."""
    for uid in ("other-1", "other-2"):
        world.bypass(uid, 1, "n", towards="GPU-0")


def bypassed_and_watched(world: Predicted) -> None:
    """Two pods of another scheduler are admitted first, and the watch delivers them before the
    report.
    """
    bypassed(world)
    for uid in ("other-1", "other-2"):
        world.hear_of(uid, "n")


def plugin_reconfigured(world: Predicted) -> None:
    """The plugin restarts with the policy ``packed``."""
    world.nodes["n"].start_plugin(Settings(4, policy="packed", release=20))


def free_replicas(world: Predicted, device: str) -> list[str]:
    return [each for each in world.nodes["n"].devices.available if each.startswith(device)]


CASES = [
    pytest.param(released, 2, Surprise.RELEASED, id="pods end by themselves"),
    pytest.param(unhealthy, 0, Surprise.HEALTH, id="replicas turn unhealthy"),
    pytest.param(bypassed, 0, Surprise.BYPASS, id="pods bypass us, and only the report shows them"),
    pytest.param(bypassed_and_watched, 0, Surprise.BYPASS, id="pods bypass us"),
    pytest.param(plugin_reconfigured, 0, Surprise.CONFIGURATION, id="the plugin is reconfigured"),
]


@pytest.mark.parametrize(("happen", "small_on_1", "surprise"), CASES)
def test_a_surprise_is_recognised_and_the_reservation_moves_to_the_observed_device(
    happen: Callable[[Predicted], None], small_on_1: int, surprise: Surprise
) -> None:
    world = node_with_a_large_pod(small_on_1=small_on_1)
    assert world.bind("p", 8, node="n") == "n"
    happen(world)
    world.admit("p", towards="GPU-1")
    assert world.excess_bytes("n").keys() == {"GPU-1"}
    outcome = world.report("n")["p"]
    assert (outcome.result, outcome.surprise) == (Result.MISS, surprise)
    assert (outcome.predicted, outcome.observed) == (("GPU-0",), ("GPU-1",))
    # The extender still counts pods that ended unseen, so it reports at least the stand-in's
    # excess.
    assert outcome.overcommitted_bytes >= world.excess_bytes("n")["GPU-1"]
    # No pod is placed on GPU-1 any more, and GPU-0 no longer has the reservation.
    one, other = world.state.cluster.snapshot().nodes[0].devices
    assert "p" not in {holder.uid for holder in one.holders}
    assert "p" in {holder.uid for holder in other.holders if holder.observed}
    assert other.headroom_bytes < 0


@pytest.mark.parametrize(("happen", "small_on_1", "surprise"), CASES)
def test_a_miss_without_a_cause_has_no_surprise(
    happen: Callable[[Predicted], None], small_on_1: int, surprise: Surprise
) -> None:
    world = node_with_a_large_pod(small_on_1=small_on_1)
    world.bind("p", 8, node="n")
    world.admit("p", towards="GPU-1")
    outcome = world.report("n")["p"]
    assert (outcome.result, outcome.surprise) == (Result.HIT, None)
    assert world.excess_bytes("n") == {}


def test_replicas_that_are_healthy_again_are_a_surprise() -> None:
    world = Predicted({"n": StandIn(gpus(2), Settings(4))})
    node = world.nodes["n"]
    world.bind("large", 20, node="n")
    world.admit("large", towards="GPU-1")
    for uid in ("small-0", "small-1"):
        world.bind(uid, 1, node="n")
    for uid in ("small-0", "small-1"):
        world.admit(uid, towards="GPU-0")
    for replica in sorted(free_replicas(world, "GPU-1"))[:2]:
        node.fail(replica)
    world.report("n")
    assert world.bind("p", 8, node="n") == "n"
    node.register_plugin()  # The restarted plugin has forgotten the failures.
    world.admit("p", towards="GPU-1")
    outcome = world.report("n")["p"]
    assert (outcome.result, outcome.surprise) == (Result.MISS, Surprise.HEALTH)
    assert world.excess_bytes("n") == {"GPU-1": 4 * GIB}


def test_a_change_that_is_undone_before_the_next_report_stays_unknown() -> None:
    world = node_with_a_large_pod()
    assert world.bind("p", 8, node="n") == "n"
    unhealthy(world)
    world.admit("p", towards="GPU-1")
    world.nodes["n"].register_plugin()  # The restarted plugin has forgotten the failure.
    outcome = world.report("n")["p"]
    assert (outcome.result, outcome.surprise) == (Result.MISS, Surprise.UNKNOWN)
    assert world.excess_bytes("n") == {"GPU-1": 4 * GIB}


def test_a_pod_deleted_before_admission_is_not_a_surprise() -> None:
    """The prediction allows for each unconfirmed pod never being admitted."""
    for choice in ("GPU-0", "GPU-1"):
        world = Predicted({"n": StandIn(gpus(2), Settings(4))})
        for uid in ("a", "b", "c"):
            assert world.bind(uid, 6, node="n") == "n"
        world.hear_of_end("b")
        world.admit("c", towards=choice)
        world.admit("a", towards=choice)
        outcomes = world.report("n")
        assert {outcomes[uid].result for uid in ("a", "c")} == {Result.HIT}
        assert world.excess_bytes("n") == {}


def test_two_pods_on_a_device_with_memory_for_one_make_the_second_a_miss() -> None:
    """Each pod is on one of its candidate devices, but the prediction excludes both together."""
    world = Predicted({"n": StandIn(gpus(2), Settings(4))})
    for uid, gpu in (("x", 0), ("y", 1)):
        world.bind(uid, 1, node="n")
        world.admit(uid, towards=f"GPU-{gpu}")
        world.report("n")
    for uid in ("a", "b"):
        assert world.bind(uid, 14, node="n") == "n"
    world.admit("a", towards="GPU-0")
    world.finish("x", "n")
    world.admit("b", towards="GPU-0")
    assert world.excess_bytes("n") == {"GPU-0": 4 * GIB}
    outcomes = world.report("n")
    assert outcomes["a"].result is Result.HIT
    assert (outcomes["b"].result, outcomes["b"].surprise) == (Result.MISS, Surprise.RELEASED)
    assert set(outcomes["b"].observed) < set(outcomes["b"].predicted)


def test_a_pod_overtaken_by_a_later_pod_is_not_a_surprise() -> None:
    world = Predicted({"n": StandIn(gpus(2), Settings(4))})
    world.bind("x", 1, node="n")
    world.admit("x", towards="GPU-1")
    world.report("n")
    for uid in ("a", "b"):
        assert world.bind(uid, 6, node="n") == "n"
    world.admit("b", towards="GPU-0")
    world.admit("a", towards="GPU-1")
    outcomes = world.report("n")
    assert (outcomes["a"].predicted, outcomes["a"].observed) == (("GPU-0",), ("GPU-1",))
    assert outcomes["a"].result is Result.SHIFTED
    assert outcomes["b"].result is Result.HIT
    assert world.excess_bytes("n") == {}


def test_a_pod_end_delivered_before_the_binding_is_not_a_surprise() -> None:
    """The prediction includes both cases, with the ending pod and without it."""
    world = Predicted({"n": StandIn(gpus(2), Settings(4))})
    for uid, gpu in (("x", 0), ("y", 1), ("z", 1)):
        world.bind(uid, 1, node="n")
        world.admit(uid, towards=f"GPU-{gpu}")
        world.report("n")
    for uid in ("y", "z"):
        world.finish(uid, "n")
        world.hear_of_end(uid)
    assert world.bind("p", 8, node="n") == "n"
    world.admit("p", towards="GPU-1")
    outcome = world.report("n")["p"]
    assert (outcome.result, outcome.observed) == (Result.HIT, ("GPU-1",))


@pytest.mark.parametrize(
    ("happen", "surprise"),
    [
        pytest.param(unhealthy, Surprise.HEALTH, id="replicas turn unhealthy"),
        pytest.param(bypassed, Surprise.BYPASS, id="pods bypass us"),
        pytest.param(plugin_reconfigured, Surprise.CONFIGURATION, id="the plugin is reconfigured"),
    ],
)
def test_if_several_surprises_occur_the_surprise_that_explains_the_miss_is_reported(
    happen: Callable[[Predicted], None], surprise: Surprise
) -> None:
    """A pod of GPU-0 also ends, which makes GPU-1 less likely."""
    world = node_with_a_large_pod()
    world.bind("small", 1, node="n")
    world.admit("small", towards="GPU-0")
    world.report("n")
    world.bind("smaller", 1, node="n")
    world.admit("smaller", towards="GPU-1")
    world.report("n")
    assert world.bind("p", 2, node="n") == "n"
    happen(world)
    world.finish("small", "n")
    world.admit("p", towards="GPU-1")
    outcome = world.report("n")["p"]
    assert (outcome.result, outcome.surprise) == (Result.MISS, surprise)
