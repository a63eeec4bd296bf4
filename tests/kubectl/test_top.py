"""Tests the order, the content and the total of `top`."""

import pytest

from headroom.kubectl.table import laid_out
from headroom.kubectl.top import SortBy, bar, devices, models, nodes, percent
from headroom.kubectl.top_pods import pods
from tests.kubectl import bodies
from tests.kubectl.bodies import GIB, device, holder, node

EKS = "ip-10-0-123-{}.eu-central-1.compute.internal"
OVER = node(EKS.format(45), *(device(n, reserved=83.5 if n == 3 else 75) for n in range(8)))
STALE = node("gke-prod-gpu-pool-1a2b3c4d-xyz1", device(memory=24), detail="for 95 s")
STALE["message"] = "GPU report of the node is stale"
SICK = node("sick", device(0), device(1, unhealthy="unhealthy", unhealthy_detail="XID 79"))
CORDONED = node("cordoned", device(used=3), cordoned=True)
FULL = node("full", device(reserved=72, used=30, replicas_free=0))
EMPTY = node("empty", device(), device(1))
SILENT = node("silent", message="no GPU report from the node")
FLEET = bodies.nodes(EMPTY, FULL, CORDONED, SICK, STALE, OVER, SILENT)


def test_nodes_fit_80_columns_with_the_worst_first() -> None:
    """An overcommitted GPU is visible even if the sums of its node look good."""
    assert [line for _, line in laid_out(nodes(FLEET), 80)] == [
        "NODE              GPUS   RESERVED      USED   HEADROOM  WORST GPU  STATE",
        "ip-10-0-123-45…      8  608.5 GiB   0.0 GiB   35.0 GiB   -3.5 GiB  overcommitted",
        "silent               0    0.0 GiB   0.0 GiB    0.0 GiB          -",
        "    no GPU report from the node",
        "gke-prod…4d-xyz1     1    0.0 GiB   0.0 GiB    0.0 GiB    0.0 GiB",
        "    GPU report of the node is stale (for 95 s)",
        "sick                 2    0.0 GiB   0.0 GiB   80.0 GiB    0.0 GiB",
        "    1 of 2 GPUs unhealthy: XID 79",
        "cordoned             1    0.0 GiB   3.0 GiB    0.0 GiB    0.0 GiB  cordoned",
        "full                 1   72.0 GiB  30.0 GiB    8.0 GiB    8.0 GiB",
        "    no free replica",
        "empty                2    0.0 GiB   0.0 GiB  160.0 GiB   80.0 GiB  ok",
        "TOTAL  7 nodes, 15 GPUs, 1,144.0 GiB allocatable",
        "       RESERVED  680.5 GiB   59 %  [############--------]",
        "       USED       33.0 GiB    3 %  [#-------------------]",
        "       HEADROOM  283.0 GiB   25 %  [#####---------------]",
    ]
    assert nodes(FLEET).bad == {0, 1, 2, 3, 4}


def test_wide_nodes_show_replicas_models_and_taints() -> None:
    tainted = node("a", device(unattributed=2), device(1), taints=["dedicated=ml:NoSchedule"])
    table = nodes(bodies.nodes(tainted), wide=True)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["FREE REPLICAS"] == "6"
    assert row["UNATTRIBUTED"] == "2.0 GiB"
    assert row["REPORT"] == "12s"
    assert row["MODELS"] == "NVIDIA H100 80GB HBM3"
    assert row["TAINTS"] == "dedicated=ml:NoSchedule"
    assert row["NEXT DEVICE"] == "predicted"


def names(order: SortBy) -> list[str]:
    return [row[0] for row in nodes(FLEET, order).rows]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (SortBy.NAME, sorted(each["name"] for each in FLEET["nodes"])),
        (SortBy.RESERVED, [OVER["name"], "full"]),
        (SortBy.USED, ["full", "cordoned"]),
        (SortBy.HEADROOM, ["cordoned", STALE["name"], "silent", "full"]),
    ],
)
def test_nodes_are_sorted(order: SortBy, expected: list[str]) -> None:
    assert names(order)[: len(expected)] == expected


def test_the_most_overcommitted_node_comes_first() -> None:
    less = node("a", device(reserved=81))
    more = node("b", device(reserved=82))
    assert [row[0] for row in nodes(bodies.nodes(less, more)).rows] == ["b", "a"]


def test_gpus_show_their_own_problems() -> None:
    taken = node("n", device(0, reserved=70, unattributed=12), device(1, unattributed=2))
    unknown = node("u", device(used_bytes=-1, unhealthy="unknown", unhealthy_detail="no figures"))
    table = devices(bodies.nodes(taken, SICK, unknown))
    assert [(row[0], row[1], row[-1]) for row in table.rows] == [
        ("n", "0", "overcommitted; 12.0 GiB unattributed"),
        ("sick", "1", "XID 79"),
        ("u", "0", "no figures"),
        ("n", "1", "2.0 GiB unattributed"),
        ("sick", "0", "ok"),
    ]
    assert [row[3] for row in table.rows] == ["0.0 GiB", "0.0 GiB", "-", "0.0 GiB", "0.0 GiB"]
    assert [row[4] for row in table.rows][:3] == ["-2.0 GiB", "0.0 GiB", "0.0 GiB"]
    assert table.bad == {0, 1, 2}


def test_a_gpu_without_an_index_has_its_uuid() -> None:
    on = device(-1, holders=[holder("p", 8, 7.5)]) | {"uuid": "GPU-x"}
    body = bodies.nodes(node("n", on))
    assert [row[1] for row in devices(body).rows] == ["GPU-x"]
    assert [row[3] for row in pods(body, None).rows] == ["GPU-x"]


def test_pods_above_their_reservation_come_first() -> None:
    both = [holder("waits", 16, observed=False)]
    body = bodies.nodes(
        node("n", device(0, holders=[holder("fits", 8, 7.5), *both]), device(1, holders=both)),
        node("m", device(0, holders=[holder("grows", 8, 9.5)])),
        node("k", *(device(n, holders=[holder("any", 4, observed=False)]) for n in range(4))),
    )
    table = pods(body, None)
    assert table.rows == [
        ("team-a", "grows", "m", "0", "8.0 GiB", "9.5 GiB", "uses 1.5 GiB more than reserved"),
        ("team-a", "fits", "n", "0", "8.0 GiB", "7.5 GiB", "ok"),
        ("team-a", "any", "k", "any of 4", "4.0 GiB", "-", "unconfirmed"),
        ("team-a", "waits", "n", "0 or 1", "16.0 GiB", "-", "unconfirmed"),
    ]
    assert table.bad == {0}
    by_size = [row[1] for row in pods(body, None, SortBy.RESERVED).rows]
    assert by_size == ["waits", "fits", "grows", "any"]
    assert pods(body, "team-b").rows == []
    wide = pods(body, None, wide=True)
    assert wide.rows[3][wide.columns.index("GPU UUID")] == "GPU-0, GPU-1"


def test_a_pod_above_its_reservation_shows_whether_it_is_evicted() -> None:
    """Each entry is about one device of one pod."""
    over = [
        {"uid": "uid-grows", "device": "GPU-1", "message": "evicted within seconds"},
        {"uid": "uid-other", "device": "GPU-0", "message": "not evicted"},
    ]
    devices = (device(number, holders=[holder("grows", 8, 9)]) for number in (0, 1))
    table = pods(bodies.nodes(node("n", *devices, overuse=over)), None)
    assert [(row[3], row[-1]) for row in table.rows] == [
        ("0", "uses 1.0 GiB more than reserved"),
        ("1", "uses 1.0 GiB more than reserved; evicted within seconds"),
    ]


def test_memory_that_gpus_share_counts_once() -> None:
    """The node has two MIG compute instances of one GPU instance, one of which is unhealthy, and a
    whole GPU.
    """
    shared = {"memory": 20, "reserved": 8, "holders": [holder("p", 8, 4)], "memory_id": "G/1"}
    sick = {"unhealthy": "unhealthy", "unhealthy_detail": "XID 79"}
    body = bodies.nodes(node("n", device(0, **shared, **sick), device(1, **shared), device(2)))
    row = dict(zip(nodes(body).columns, nodes(body).rows[0], strict=True))
    assert (row["GPUS"], row["RESERVED"], row["HEADROOM"]) == ("3", "8.0 GiB", "92.0 GiB")
    assert nodes(body).total[0] == "TOTAL  1 node, 3 GPUs, 100.0 GiB allocatable"
    assert devices(body).total[0] == "TOTAL  3 GPUs, 100.0 GiB allocatable"
    assert len(devices(body).rows) == 3
    table = pods(body, None, wide=True)
    assert [(r[1], r[3], r[-3]) for r in table.rows] == [("p", "0, 1", "GPU-0, GPU-1")]


def test_models_show_how_many_gpus_have_a_problem() -> None:
    model = {
        **{"model": "NVIDIA L4", "devices": 3, "replicas_free": 5},
        **{"allocatable_bytes": 72 * GIB, "reserved_total_bytes": 36 * GIB},
        **{"unattributed_bytes": 0, "used_bytes": 9 * GIB, "headroom_bytes": 18 * GIB},
    }
    table = models({"models": [model | {"unhealthy": 1, "overcommitted": 2, "cordoned": 0}]})
    assert table.rows == [
        (
            "NVIDIA L4",
            "3",
            "36.0 GiB",
            "9.0 GiB",
            "18.0 GiB",
            "2 GPUs overcommitted; 1 GPU unhealthy",
        )
    ]
    assert table.total[0] == "TOTAL  3 GPUs, 72.0 GiB allocatable"
    assert table.total[1] == "       RESERVED  36.0 GiB   50 %  [##########----------]"
    none = {"unhealthy": 0, "overcommitted": 0, "cordoned": 0}
    assert models({"models": [model | none]}).rows[0][-1] == "ok"
    assert models({"models": [model | none | {"cordoned": 1}]}).rows[0][-1] == "1 GPU cordoned"


def test_a_cordoned_gpu_is_shown_on_its_line_and_on_its_nodes() -> None:
    body = bodies.nodes(node("n", device(0), device(1, cordoned=True)))
    assert [row[-1] for row in nodes(body).rows] == ["1 of 2 GPUs cordoned"]
    states = {row[1]: row[-1] for row in devices(body).rows}
    assert states == {"0": "ok", "1": "cordoned"}
    assert nodes(body).total[-1].split()[1] == "80.0"


@pytest.mark.parametrize(
    ("ratio", "filled"), [(0.0, 0), (0.001, 1), (0.5, 10), (0.999, 19), (1.0, 20), (1.3, 20)]
)
def test_a_bar_is_full_only_if_all_memory_is_used(ratio: float, filled: int) -> None:
    assert bar(ratio) == f"[{'#' * filled}{'-' * (20 - filled)}]"
    assert percent(1.3) == "130 %"


def test_a_single_node_and_an_empty_fleet_are_shown() -> None:
    assert nodes(bodies.nodes(EMPTY)).total[0] == "TOTAL  1 node, 2 GPUs, 160.0 GiB allocatable"
    nothing = nodes(bodies.nodes())
    assert nothing.rows == []
    assert nothing.total[1] == "       RESERVED  0.0 GiB    0 %  [--------------------]"
