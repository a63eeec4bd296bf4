"""Tests how the peak of a container is measured, when its use counts as settled, and which run of
the container a peak belongs to.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.peaks import Life, Lives, Peaks
from tests.agent.lives import GIB, MIB, A, Node, node, peaks, seconds_of

MAX_LIVES = 4096
MAX_ROWS_WITH_PEAKS = 2048
FORGOTTEN_AFTER_S = 600.0

__all__ = ["node"]


def test_a_peak_is_the_largest_sample_of_the_run(node: Node) -> None:
    for used in (2, 9, 3):
        node.used[A] = used * GIB
        row = node.one()
    assert row.used_bytes == 3 * GIB
    assert peaks(row) == {
        "peak_bytes": 9 * GIB,
        "startup_peak_bytes": 9 * GIB,
        "peak_source": "nvml",
        "started_at": "2026-11-20T20:16:45Z",
    }


def test_a_container_without_a_process_on_the_device_has_no_run_yet(node: Node) -> None:
    row = node.one()
    assert (row.used_bytes, peaks(row)) == (0, {})


def test_ended_processes_do_not_end_the_run(node: Node) -> None:
    """For example, a notebook ends its kernel and starts another kernel."""
    node.used[A] = 9 * GIB
    node.sample()
    node.end("c1")
    row = node.one()
    assert (row.used_bytes, row.peak_bytes) == (0, 9 * GIB)
    node.used[A] = 2 * GIB
    assert node.one().peak_bytes == 9 * GIB


def test_a_restarted_container_begins_a_new_run(node: Node) -> None:
    node.used[A] = 9 * GIB
    node.samples(lambda _: 9 * GIB, 60, A)
    node.end("c1")
    node.run("c2", "u")
    node.used["GPU-a", "c2"] = 2 * GIB
    row = node.one()
    assert peaks(row) == {
        "peak_bytes": 2 * GIB,
        "startup_peak_bytes": 2 * GIB,
        "peak_source": "nvml",
        "started_at": "2026-11-20T20:17:45Z",
    }


def test_a_container_that_is_still_ending_does_not_count_for_the_next_run(node: Node) -> None:
    node.used[A] = 9 * GIB
    node.sample()
    node.run("c2", "u")
    node.used["GPU-a", "c2"] = 2 * GIB
    row = node.one()
    assert (row.used_bytes, row.peak_bytes) == (11 * GIB, 2 * GIB)
    node.end("c2")  # The new container has crashed.
    row = node.one()
    assert (row.used_bytes, row.peak_bytes) == (9 * GIB, 2 * GIB)


def test_all_processes_of_a_container_are_added_up() -> None:
    """The pod has several processes, which share its memory use."""
    node = Node()
    node.hold("u")
    node.sample()
    node.run("c1", "u")
    node.containers["twin"] = node.containers["c1"]  # This is another process of the container.
    node.used |= {A: 3 * GIB, ("GPU-a", "twin"): 4 * GIB}
    row = node.one()
    assert (row.used_bytes, row.peak_bytes) == (7 * GIB, 7 * GIB)


def test_containers_of_a_pod_have_separate_peaks_if_their_names_are_known() -> None:
    node = Node()
    node.hold("u", "main", "GPU-a::0")
    node.hold("u", "side", "GPU-a::1")
    node.run("c1", "u", "main")
    node.run("c2", "u", "side")
    node.used |= {A: 3 * GIB, ("GPU-a", "c2"): 4 * GIB}
    rows = node.sample()
    assert [(r.container, r.used_bytes, r.peak_bytes) for r in rows] == [
        ("main", 3 * GIB, 3 * GIB),
        ("side", 4 * GIB, 4 * GIB),
    ]
    assert node.before is not None
    assert node.before.devices[0].unattributed_bytes == 0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("", ""), id="no container name is known"),
        pytest.param(("main", "proxy"), id="a process in a container without a replica"),
        pytest.param(("",), id="unknown name of the only container"),
    ],
)
def test_use_of_an_unknown_container_has_no_peak(names: tuple[str, ...]) -> None:
    node = Node()
    node.hold("u", "main", "GPU-a::0")
    node.hold("u", "side", "GPU-a::1")
    for number, name in enumerate(names):
        node.run(f"c{number}", "u", name)
        node.used["GPU-a", f"c{number}"] = 3 * GIB
    rows = node.sample()
    assert [(r.used_bytes, peaks(r)) for r in rows] == [(len(names) * 3 * GIB, {}), (0, {})]


def test_unnamed_containers_of_a_pod_without_devices_have_no_peak() -> None:
    node = Node()
    for container_id in ("c1", "c2"):
        node.run(container_id, "u", name="")
        node.used["GPU-a", container_id] = GIB
    row = node.one()
    assert (row.used_bytes, peaks(row)) == (2 * GIB, {})


def test_the_only_container_that_holds_a_device_needs_no_name(node: Node) -> None:
    node.run("c1", "u", name="")
    node.used[A] = GIB
    assert node.one().peak_bytes == GIB


def test_a_pod_without_a_replica_also_has_a_peak() -> None:
    """Such a pod has chosen its device itself."""
    node = Node()
    node.sample()
    node.run("c1", "u", "main")
    node.used[A] = GIB
    row = node.one()
    assert (row.container, row.peak_bytes, row.replica) == ("", GIB, "")


def test_a_pod_has_a_separate_run_on_each_device() -> None:
    node = Node(devices={"GPU-a": {}, "GPU-b": {}})
    node.hold("u", "main", "GPU-a::0")
    node.hold("u", "main", "GPU-b::0")
    node.run("c1", "u")
    node.used |= {A: 3 * GIB, ("GPU-b", "c1"): GIB}
    node.sample()
    node.used[A] = GIB
    rows = node.sample()
    assert [(r.device, r.peak_bytes) for r in rows] == [("GPU-a", 3 * GIB), ("GPU-b", GIB)]


def test_compute_instances_of_one_gpu_instance_have_one_memory() -> None:
    place = {"kind": "mig", "parent": "GPU-p", "gpu_instance": 3}
    node = Node(devices={"MIG-1": place, "MIG-2": place})
    node.hold("u", "main", "MIG-1")
    node.hold("v", "main", "MIG-2")
    node.run("c1", "u")
    node.run("c2", "v")
    node.used |= {("MIG-1", "c1"): 3 * GIB, ("MIG-2", "c2"): GIB}
    rows = node.sample()
    assert [(r.uid, r.device, r.peak_bytes) for r in rows] == [
        ("u", "MIG-1", 3 * GIB),
        ("v", "MIG-2", GIB),
    ]


def test_use_that_the_driver_does_not_report_has_no_peak(node: Node) -> None:
    """The driver does not report use on WSL and in vGPU guests."""
    node.used[A] = None
    row = node.one()
    assert row.used_bytes is None
    assert peaks(row) == {"started_at": "2026-11-20T20:16:45Z"}


def test_a_peak_survives_samples_without_attribution_and_long_gaps_are_reported(node: Node) -> None:
    node.used[A] = 9 * GIB
    node.sample()
    node.sees_processes = False
    row = node.one(60.0)
    assert (row.used_bytes, row.peak_bytes, row.peak_partial) == (None, 9 * GIB, False)
    node.sees_processes = True
    node.used[A] = GIB
    row = node.one(1.0)
    assert (row.peak_bytes, row.peak_partial, row.startup_peak_bytes) == (9 * GIB, True, None)


def test_a_container_that_ran_before_the_agent_has_a_partial_peak() -> None:
    node = Node()
    node.hold("u")
    node.run("c1", "u", age_s=300.0)
    node.used[A] = 9 * GIB
    row = node.samples(lambda _: 9 * GIB, 60, A)
    assert peaks(row) == {
        "peak_bytes": 9 * GIB,
        "peak_source": "nvml",
        "peak_partial": True,
        "started_at": "2026-11-20T20:11:40Z",
    }


def test_a_container_that_loads_slowly_is_measured_from_its_start(node: Node) -> None:
    """The container downloads a model for ten minutes. During this time, the agent sees no process
    of the container.
    """
    for _ in range(120):
        node.sample()
    node.used[A] = 9 * GIB
    row = node.one()
    assert (row.peak_partial, row.startup_peak_bytes) == (False, 9 * GIB)
    assert row.started_at == "2026-11-20T20:16:45Z"


def test_use_settles_when_it_has_changed_by_less_than_two_percent_for_20_s(node: Node) -> None:
    def used(at_s: float) -> int:
        return round(min(at_s, 30.0) * GIB / 3)  # 10 GiB after 30 s

    row = node.samples(used, 45, A)
    assert (row.settled_at, row.startup_peak_bytes) == ("", 10 * GIB)
    row = node.samples(lambda at_s: 10 * GIB + round(at_s * MIB), 20, A)
    assert seconds_of(row.settled_at) - seconds_of(row.started_at) == 50
    row = node.samples(lambda _: 60 * GIB, 5, A)
    assert (row.peak_bytes, row.startup_peak_bytes) == (60 * GIB, 10 * GIB + 5 * MIB)


@pytest.mark.parametrize(
    ("low", "high", "settles"),
    [
        pytest.param(9810 * MIB, 10_000 * MIB, True, id="1.9 percent"),
        pytest.param(9800 * MIB, 10_000 * MIB, False, id="2 percent"),
        pytest.param(64 * MIB, 64 * MIB, False, id="64 MiB, which a CUDA context takes"),
        pytest.param(65 * MIB, 65 * MIB, True, id="more than 64 MiB"),
        pytest.param(0, 0, False, id="nothing"),
    ],
)
def test_the_time_at_which_use_has_settled(node: Node, low: int, high: int, settles: bool) -> None:
    row = node.samples(lambda at_s: high if at_s % 10 else low, 300, A)
    assert bool(row.settled_at) == settles
    assert row.startup_peak_bytes == high


def test_a_crash_during_the_start_restarts_the_wait(node: Node) -> None:
    node.samples(lambda _: GIB, 15, A)
    node.end("c1")
    node.sample()
    row = node.samples(lambda _: GIB, 20, A)
    assert row.settled_at == ""
    assert node.samples(lambda _: GIB, 5, A).settled_at


def test_a_clock_step_changes_no_time_of_a_run(node: Node) -> None:
    node.used[A] = GIB
    before = node.one()
    node.clock_off_s = -86_400.0
    row = node.samples(lambda _: GIB, 30, A)
    assert row.started_at == before.started_at
    assert seconds_of(row.settled_at) - seconds_of(row.started_at) == 25


def test_a_run_is_dropped_ten_minutes_after_its_pod_left_the_report(node: Node) -> None:
    node.used[A] = GIB
    node.sample()
    holding = node.holdings.pop()
    node.end("c1")
    node.sample(FORGOTTEN_AFTER_S)
    node.holdings.append(holding)
    assert node.one(0.0).peak_bytes == GIB  # The kubelet's list was incomplete for some time.
    node.holdings.clear()
    node.sample(FORGOTTEN_AFTER_S + 1)
    node.holdings.append(holding)
    assert node.one(1.0).peak_bytes is None


def test_a_run_that_is_in_the_report_is_kept_at_any_age(node: Node) -> None:
    node.used[A] = 9 * GIB
    node.sample()
    row = node.samples(lambda _: GIB, FORGOTTEN_AFTER_S + 60, A)
    assert row.peak_bytes == 9 * GIB


def test_a_container_with_several_replicas_of_a_device_has_one_peak() -> None:
    node = Node()
    node.hold("u", "main", "GPU-a::0")
    node.hold("u", "main", "GPU-a::1")
    node.run("c1", "u")
    node.used[A] = GIB
    assert [row.peak_bytes for row in node.sample()] == [GIB, None]


def test_the_number_of_runs_is_limited() -> None:
    def life(number: int) -> Life:
        return Life(f"u{number}", "GPU-a", "main", f"c{number}", "", 0.0, shown_s=float(number))

    kept = Peaks(Lives([life(number) for number in range(MAX_LIVES + 5)]), 1e6)
    assert len(kept.lives.lives) == MAX_LIVES
    assert kept.lives.lives[0].uid == "u5"
    node = Node()
    for number in range(MAX_LIVES + 5):
        node.run(f"c{number}", f"u{number}")
        node.used["GPU-a", f"c{number}"] = MIB
    node.sample()
    node.sample()
    assert len(node.recorder._peaks.lives.lives) == MAX_LIVES


def test_the_number_of_rows_with_peaks_is_limited() -> None:
    """The limit exists because etcd accepts objects of at most 1.5 MiB."""
    node = Node()
    for number in range(MAX_ROWS_WITH_PEAKS + 5):
        node.run(f"c{number:04}", f"u{number:04}")
        node.used["GPU-a", f"c{number:04}"] = MIB
    rows = node.sample()
    assert [row.peak_bytes for row in rows] == [MIB] * MAX_ROWS_WITH_PEAKS + [None] * 5


USES = st.lists(st.integers(0, 60) | st.none(), min_size=1, max_size=40)


@given(USES, st.lists(st.integers(0, 80), max_size=40))
def test_a_peak_is_at_least_every_sample_and_never_shrinks(
    uses: list[int | None], marks: list[int]
) -> None:
    node = Node()
    node.hold("u")
    node.sample()
    node.run("c1", "u")
    peak, settled_at = 0, ""
    for number, used in enumerate(uses):
        node.used[A] = None if used is None else used * GIB
        if number < len(marks):
            node.marks[A] = marks[number] * GIB
        row = node.one()
        assert row.started_at
        if used is not None:
            assert row.peak_bytes is not None
            assert row.peak_bytes >= max(peak, used * GIB)
            assert (row.startup_peak_bytes or 0) <= row.peak_bytes
        peak = row.peak_bytes or peak
        assert settled_at in ("", row.settled_at)
        settled_at = row.settled_at


def test_times_use_the_clock_of_the_first_sample() -> None:
    node = Node()
    node.hold("u")
    node.run("c1", "u", age_s=7.0)
    node.used[A] = GIB
    row = node.one()
    assert seconds_of(row.started_at) == 993.0
