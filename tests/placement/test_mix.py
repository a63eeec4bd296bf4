"""Tests the prices of device classes, which depend on the demand of pods."""

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.contract.gpunode import Replicas
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.demand_pricing import DemandMix, DemandTracker, Market, market, prices
from headroom.core.placement.fit import fit
from headroom.core.placement.fit_cache import FitCache
from headroom.core.placement.policy import Weights
from headroom.core.placement.score import rank
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.snapshot_builder import Table, build
from tests.builders import (
    GIB,
    NOW_S,
    container,
    device,
    pod,
    request,
    reservation,
    shared,
    use,
    weighed,
)

EVERY_PODS = 64
HALF_LIFE_PODS = 2000
MOST_CLASSES = 64
MOST_SELECTORS = 256
MOST_SETS = 32

SMALL, LARGE = 16 * GIB, 64 * GIB
#: Classes of devices of these sizes, on nodes with one device.
OF_SMALL, OF_LARGE = SMALL + 1, LARGE + 1
FRAGMENTATION = {"headroom.gpu/policy": "fragmentation"}


def node(name: str, memory_bytes: int) -> NodeTerms:
    return weighed(shared(name, memory_bytes=memory_bytes), name=name)


def fleet() -> Snapshot:
    return build([node("large", LARGE), *(node(f"small{i}", SMALL) for i in range(4))])


def wants(name: str, vram: str, selector: dict[str, str] | None = None) -> Pod:
    made = pod(vram, name=name, uid=name, annotations=FRAGMENTATION)
    return made if selector is None else _selecting(made, selector)


def _selecting(made: Pod, selector: dict[str, str]) -> Pod:
    spec = msgspec.structs.replace(made.spec, node_selector=selector)
    return msgspec.structs.replace(made, spec=spec)


@given(st.permutations(range(5)), st.integers(0, 5), st.integers(0, 2))
def test_rows_are_counted_by_class(order: list[int], known: int, unknown: int) -> None:
    snap = fleet()
    found = market(snap, {}, 0)
    assert found is not None
    rows = np.array([*order[:known], *[-1] * unknown], np.int64)
    large = sum(row == 0 for row in rows)
    assert found.counts(snap, rows).tolist() == [known - large, large, 0]


def see(usual: DemandTracker, snap: Snapshot, asked: Pod, *rows: int) -> None:
    usual.prepare(request(asked), snap)
    usual.see(request(asked), asked, snap, np.array(rows or range(len(snap.nodes)), np.int64))


def test_all_classes_cost_1_if_all_pods_can_use_all_classes() -> None:
    sizes, capacity = np.array([16, 64]), np.array([100.0, 300.0])
    assert prices({}, sizes, capacity).tolist() == [1, 1]
    assert prices({(16, 64): 7.0}, sizes, capacity).tolist() == [1, 1]


def test_a_class_is_expensive_if_many_pods_depend_on_it() -> None:
    """Half of the demand fits only on the large devices, which have a quarter of the memory. Their
    price is 0.5 * 4 plus their part of the other half.
    """
    sizes, capacity = np.array([16, 64]), np.array([300.0, 100.0])
    found = prices({(64,): 50.0, (16, 64): 50.0}, sizes, capacity)
    assert found.tolist() == [0.5, 2.5]


@given(
    st.dictionaries(
        st.sets(st.sampled_from([1, 2, 3, 4]), min_size=1).map(lambda s: tuple(sorted(s))),
        st.floats(1, 1e6),
        min_size=1,
    ),
    st.lists(st.integers(1, 1000), min_size=4, max_size=4),
)
def test_the_mean_price_weighted_by_memory_is_1(
    demand: dict[tuple[int, ...], float], capacity: list[int]
) -> None:
    found = prices(demand, np.array([1, 2, 3, 4]), np.array(capacity, np.float64))
    assert found @ np.array(capacity) == pytest.approx(sum(capacity))
    assert (found >= 0).all()


def test_old_demand_decays_with_its_half_life() -> None:
    mix = DemandMix()
    mix.add((1,), 1.0)
    for _ in range(HALF_LIFE_PODS):
        mix.add((2,), 1.0)
    mix.add((3,), 1.0)
    assert mix.demand[(1,)] / mix.demand[(3,)] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(("promised_gib", "left_gib"), [(0, 67.2), (12, 19.2), (16, 3.2)])
def test_a_class_becomes_more_expensive_as_it_fills(promised_gib: int, left_gib: float) -> None:
    """One of 21 pods depends on the small devices. As the others fill them, the price per free byte
    rises, so that the rest stays free for pods that fit nowhere else.
    """
    nodes = [node("large", LARGE)]
    for uuid in ("a", "b", "c", "d"):
        held = {"u": reservation({uuid: promised_gib * GIB})} if promised_gib else {}
        nodes.append(weighed(shared(uuid, memory_bytes=SMALL), name=uuid, reservations=held))
    found = of(build(nodes), {(OF_SMALL, OF_LARGE): 20.0, (OF_SMALL,): 1.0})
    small, large = found.prices
    whole_gib = 64 * 1.05 + left_gib
    assert small / large == pytest.approx(1 + whole_gib / left_gib / 20)


def test_the_mix_is_limited_and_keeps_the_most_frequent_demand() -> None:
    mix = DemandMix()
    mix.add((0,), 1e9)
    for size in range(3 * MOST_SETS):
        mix.add((size + 1,), 1.0)
    assert len(mix.demand) == MOST_SETS
    assert (0,) in mix.demand


def test_pods_count_once_with_all_classes_ever_offered_for_their_selectors() -> None:
    usual, snap = DemandTracker(wanted=True), fleet()
    see(usual, snap, wants("a", "8Gi"))
    see(usual, snap, wants("b", "8Gi"), 0)  # The small devices are full for now.
    see(usual, snap, wants("b", "8Gi"), 0)
    see(usual, snap, wants("c", "32Gi"))
    see(usual, snap, wants("d", "8Gi", {"model": "large"}), 0)
    see(usual, snap, wants("e", "50%"))
    see(usual, snap, wants("f", "8Gi"), -1)
    mean = snap.columns.allocatable_bytes.sum() / 5
    found = {classes: round(weight / GIB, 1) for classes, weight in usual.mix.demand.items()}
    assert found == {
        (OF_SMALL, OF_LARGE): pytest.approx(16 + mean / 2 / GIB, rel=0.01),
        (OF_LARGE,): pytest.approx(40, rel=0.01),
    }


def test_prices_are_computed_only_after_a_pod_needs_them() -> None:
    usual, snap = DemandTracker(wanted=False), fleet()
    plain = pod("8Gi", name="plain", uid="plain", annotations={"headroom.gpu/policy": "pack"})
    see(usual, snap, plain)
    assert usual.market is None
    see(usual, snap, wants("a", "8Gi"))
    assert usual.market is not None


def test_prices_change_with_demand_and_are_computed_rarely() -> None:
    usual, snap = DemandTracker(wanted=True), fleet()
    markets = set()
    for number in range(2000):
        see(usual, snap, wants(f"p{number}", "32Gi" if number % 2 else "8Gi"))
        markets.add(usual.market)
    assert len(markets) < 16  # A few computations at the beginning, and then no more changes.
    before = usual.market
    for number in range(2000):
        see(usual, snap, wants(f"q{number}", "8Gi"))
    assert usual.market is not before


def test_the_number_of_recorded_pods_is_limited() -> None:
    usual, snap = DemandTracker(wanted=True), fleet()
    for number in range(2 * MOST_SELECTORS):
        see(usual, snap, wants(f"p{number}", "8Gi", {"n": str(number)}))
    assert len(usual.offered) == MOST_SELECTORS
    many = build([node(f"n{i}", SMALL + i * GIB) for i in range(3 * MOST_CLASSES)])
    found = market(many, {}, 0)
    assert found is not None
    assert len(found.sizes) <= MOST_CLASSES


def test_prices_are_recomputed_if_the_fleet_changes() -> None:
    usual = DemandTracker(wanted=True)
    see(usual, fleet(), wants("a", "8Gi"))
    grown = build([*fleet().nodes, node("larger", 2 * LARGE)])
    see(usual, grown, wants("b", "100Gi"))
    assert usual.market is not None
    assert (2 * LARGE + 1,) in usual.mix.demand


def test_a_node_that_moves_to_another_row_keeps_its_class() -> None:
    """The last node gets the row of a deleted node. By rows, the pod would count for the small
    devices of that node.
    """
    table = Table()
    for each in (node("small", SMALL), node("large", LARGE)):
        table.put(each)
    usual = DemandTracker(wanted=True)
    see(usual, table.snapshot(), wants("a", "8Gi"))
    table.drop("small")
    see(usual, table.snapshot(), wants("b", "8Gi", {"model": "large"}))
    assert set(usual.mix.demand) == {(OF_SMALL, OF_LARGE), (OF_LARGE,)}


#: The recorded demand decides the prices alone.
MANY_PODS = 10**9


def of(snap: Snapshot, demand: dict[tuple[int, ...], float]) -> Market:
    found = market(snap, demand, MANY_PODS)
    assert found is not None
    return found


def test_a_small_pod_avoids_the_class_that_others_need() -> None:
    """The large device is fuller, so best fit alone would choose it."""
    full = reservation({"large": 52 * GIB})
    taken = weighed(shared("large", memory_bytes=LARGE), name="large", reservations={"u": full})
    snap = build([taken, *(node(f"small{i}", SMALL) for i in range(4))])
    verdicts = fit(request(wants("p", "8Gi")), snap, np.arange(5), NOW_S)
    dear = of(snap, {(OF_SMALL, OF_LARGE): 1.0, (OF_LARGE,): 20.0})
    cheap = of(snap, {(OF_SMALL, OF_LARGE): 1.0, (OF_SMALL,): 20.0})
    assert rank(verdicts, Weights(smallest_device=0)).winner == 0
    assert rank(verdicts, Weights(), dear).winner != 0
    assert rank(verdicts, Weights(), cheap).winner == 0


def test_the_smallest_device_is_not_preferred_in_addition_to_prices() -> None:
    """The term approximates prices, and using both reduces density."""
    verdicts = fit(request(wants("p", "8Gi")), fleet(), np.arange(5), NOW_S)
    differing = of(fleet(), {(OF_SMALL, OF_LARGE): 1.0, (OF_LARGE,): 2.0})
    assert set(rank(verdicts, Weights(), differing).terms["smallest_device"].tolist()) == {0.5}
    packed = pod("8Gi", annotations={"headroom.gpu/policy": "pack"})
    plain = fit(request(packed), fleet(), np.arange(5), NOW_S)
    assert len(set(rank(plain, Weights()).terms["smallest_device"].tolist())) == 2


@pytest.mark.parametrize(
    "demand", [{}, {(OF_SMALL, OF_LARGE): 3.0}, {(OF_SMALL, OF_LARGE): 99.0, (OF_LARGE,): 1.0}]
)
def test_equal_prices_score_as_with_pack(demand: dict[tuple[int, ...], float]) -> None:
    """Equal prices prefer no class. On nodes whose plugin chooses, best fit is then denser."""
    snap, rows = fleet(), np.arange(5)
    market = of(snap, demand)
    cache = FitCache(Weights())
    scores = []
    for policy in ("fragmentation", "pack"):
        asked = request(pod("8Gi", annotations={"headroom.gpu/policy": policy}))
        ranking = rank(fit(asked, snap, rows, NOW_S), Weights(), market)
        cached = cache.weigh(asked, snap).rank(asked, snap, rows, NOW_S, market)
        assert cached.scores.tolist() == ranking.scores.tolist()
        scores.append((ranking.scores.tolist(), {n: t.tolist() for n, t in ranking.terms.items()}))
    assert scores[0] == scores[1]


def test_a_node_without_devices_has_no_price() -> None:
    """For example, its agent has never reported. No pod can use it, so its class would cost 0."""
    bare = weighed(name="bare", reason=Reason.NO_REPORT)
    snap = build([*fleet().nodes, bare])
    assert of(snap, {(OF_SMALL, OF_LARGE): 3.0}).uniform
    assert not of(snap, {(OF_SMALL, OF_LARGE): 3.0, (OF_LARGE,): 3.0}).uniform


def test_cached_ranks_equal_the_terms_with_prices() -> None:
    snap = fleet()
    asked = request(wants("p", "8Gi"))
    found = of(snap, {(OF_SMALL, OF_LARGE): 1.0, (OF_LARGE,): 2.0})
    verdicts = fit(asked, snap, np.arange(5), NOW_S)
    shown = rank(verdicts, Weights(), found)
    cached = FitCache(Weights()).weigh(asked, snap)
    kept = cached.rank(asked, snap, np.arange(5), NOW_S, found)
    assert kept.scores.tolist() == shown.scores.tolist()
    total = sum(Weights().parts[name] * term for name, term in shown.terms.items())
    assert total == pytest.approx(shown.scores)
    assert (shown.terms["packing"] <= 1).all()
    without = cached.rank(asked, snap, np.arange(5), NOW_S)
    assert without.scores.tolist() != kept.scores.tolist()


def test_the_class_of_a_node_follows_its_largest_device() -> None:
    table = Table()
    for each in fleet().nodes:
        table.put(each)
    snap, rows = table.snapshot(), np.arange(5)
    found = of(snap, {(OF_SMALL, OF_LARGE): 1.0})
    assert found.classes(snap, rows).tolist() == [1, 0, 0, 0, 0]
    table.put(node("small1", LARGE))
    table.put(node("small2", 32 * GIB))  # There is no class in the market.
    assert found.classes(table.snapshot(), rows).tolist() == [1, 0, 1, 2, 0]
    assert found.classes(snap, rows).tolist() == [1, 0, 0, 0, 0]


def test_prices_are_computed_rarely_in_a_large_fleet() -> None:
    """Counts computations instead of seconds: one covers many pods."""
    looks = 0

    class Counted(DemandTracker):
        def _update_prices(self, snap: Snapshot) -> None:
            nonlocal looks
            looks += 1
            super()._update_prices(snap)

    usual, snap = Counted(wanted=True), fleet()
    for number in range(10 * EVERY_PODS):
        see(usual, snap, wants(f"p{number}", "8Gi"))
    assert 1 < looks < 20


def test_a_whole_device_counts_as_an_average_device() -> None:
    usual = DemandTracker(wanted=True)
    snap = build([weighed(device(), name="n")])
    plain = pod(None, container(), name="x", uid="x")
    usual.see(request(plain), plain, snap, np.arange(1))
    assert sum(usual.mix.demand.values()) == pytest.approx(
        int(snap.columns.allocatable_bytes[0, 0]), rel=0.01
    )


@pytest.mark.parametrize("policy", ["pack", "fragmentation"])
def test_pods_with_two_devices_leave_a_node_empty_for_a_pod_with_eight(policy: str) -> None:
    """On unshared nodes, allocated devices are no risk for other pods."""
    devices = [device(f"GPU-{i}") for i in range(8)]
    gone = Replicas(free=0, allocated=1)
    held = [device(f"GPU-{i}", replicas=gone) for i in range(2)]
    reservations = {f"u{i}": reservation({f"GPU-{i}": 24 * GIB}) for i in range(2)}
    begun = weighed(*held, *devices[2:], name="begun", reservations=reservations)
    snap = build([weighed(*devices, name="empty"), begun])
    asked = pod("100%", container(gpus=2), annotations={"headroom.gpu/policy": policy})
    verdicts = fit(request(asked), snap, np.arange(2), NOW_S)
    assert verdicts.fits.all()
    assert rank(verdicts, Weights()).winner == 1


def test_prices_affect_pods_with_several_devices_too() -> None:
    """The partly used node has the class that others need, so pods with one and with two devices
    avoid it. If all pods can use every class, both use it, and the empty nodes stay whole.
    """
    dear, cheap = 25 * GIB, 24 * GIB
    of_dear, of_cheap = dear + 4, cheap + 4  # The nodes have eight devices.
    gone = Replicas(free=0, allocated=1)
    large = [device(f"GPU-{i}", memory_bytes=dear) for i in range(8)]
    held = [device(f"GPU-{i}", memory_bytes=dear, replicas=gone) for i in range(2)]
    reservations = {f"u{i}": reservation({f"GPU-{i}": dear}) for i in range(2)}
    sitting = [use(f"u{i}", f"GPU-{i}") for i in range(2)]
    begun = weighed(*held, *large[2:], name="begun", reservations=reservations, pods=sitting)
    small = [device(f"GPU-{i}", memory_bytes=cheap) for i in range(8)]
    snap = build([begun, *(weighed(*small, name=f"empty{i}") for i in range(4))])
    rows = np.arange(5)
    needed = of(snap, {(of_cheap, of_dear): 1.0, (of_dear,): 20.0})
    equal = of(snap, {(of_cheap, of_dear): 1.0})
    winners = []
    for gpus, found in itertools.product((1, 2), (needed, equal)):
        asked = request(pod("100%", container(gpus=gpus), annotations=FRAGMENTATION))
        verdicts = fit(asked, snap, rows, NOW_S)
        assert verdicts.fits.all()
        shown = rank(verdicts, Weights(), found)
        cached = FitCache(Weights()).weigh(asked, snap)
        assert cached.rank(asked, snap, rows, NOW_S, found).winner == shown.winner
        winners.append(shown.winner == 0)
    assert winners == [False, True, False, True]


def several(name: str, devices: int, memory_bytes: int = SMALL) -> NodeTerms:
    made = [shared(f"{name}-{i}", memory_bytes=memory_bytes) for i in range(devices)]
    return weighed(*made, name=name)


def test_pods_with_several_devices_depend_on_nodes_with_enough_devices() -> None:
    """kube-scheduler offers them every node, because a shared device has several replicas."""
    usual = DemandTracker(wanted=True)
    snap = build([several("one", 1), several("three", 3), several("four", 4), several("eight", 8)])
    for gpus in (1, 2, 4, 5, 8):
        asked = pod("8Gi", container(gpus=gpus), name=f"{gpus}", uid=f"{gpus}")
        see(usual, snap, asked)
    # Widths are powers of two, so a pod with 5 devices counts for the node with 4, too.
    classes = [SMALL + width for width in (1, 2, 3, 4)]
    assert [classes.index(each[0]) for each in usual.mix.demand] == [0, 1, 2, 3]
    assert {each[-1] for each in usual.mix.demand} == {classes[-1]}


def test_a_pod_with_one_device_leaves_wide_nodes_to_pods_that_need_them() -> None:
    """The wide node is fuller, so best fit alone would choose it."""
    taken = {"u": reservation({"wide-0": 8 * GIB})}
    devices = [shared(f"wide-{i}", memory_bytes=SMALL) for i in range(8)]
    wide = weighed(*devices, name="wide", reservations=taken)
    snap = build([wide, *(several(f"narrow{i}", 1) for i in range(4))])
    usual = DemandTracker(wanted=True)
    for number in range(9):
        gpus = 8 if number % 2 else 1
        see(usual, snap, pod("4Gi", container(gpus=gpus), name=f"{number}", uid=f"{number}"))
    verdicts = fit(request(wants("p", "4Gi")), snap, np.arange(5), NOW_S)
    assert rank(verdicts, Weights()).winner == 0
    assert rank(verdicts, Weights(), usual.market).winner != 0


@pytest.mark.parametrize("taken_bytes", [SMALL // 8, SMALL, 8 * SMALL])
def test_prices_that_differ_by_a_factor_of_two_decide_for_small_and_large_pods(
    taken_bytes: int,
) -> None:
    found = of(fleet(), {(OF_SMALL, OF_LARGE): 1.0, (OF_LARGE,): 2.0})
    small, large = found.prices
    assert large > 2 * small
    taken = np.full(2, taken_bytes)
    dear, cheap = found.cheap(fleet(), np.array([0, 1]), taken).tolist()
    assert 0 < dear < cheap <= 1
