"""Tests the memory limits of containers that drivers r615 and newer report."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs

from agent.attribution import container_limits
from agent.probes.driver_limits_probe import LimitsProbe
from agent.probes.nvml import Gate
from agent.probes.readings import (
    Degraded,
    DeviceReading,
    DriverReading,
    HoldingReading,
    LimitReading,
    MirrorReading,
    Reading,
    SourceReading,
)
from tests.agent.limited import CALL, HASH, SAMPLE, UIDS, granting, held, library, reported, source
from tests.agent.whole import Whole
from tests.driver import GIB
from tests.threads import begun_since
from tests.waiting import until


@pytest.mark.slow  # starts an agent
def test_every_container_with_a_limit_or_a_count_is_reported_and_printed(whole: Whole) -> None:
    limited, counted, neither = map(whole.cgroup, UIDS[:3])
    whole.driver.say(
        "GPU-a",
        f"limit {limited} {2 * GIB} {8 * GIB} {3 * GIB}",
        f"limit {counted} 0 max {GIB}",
        f"limit {neither} 0 max 0",
    )
    status = reported(whole)
    assert source(status) == ("ok", "")
    whose = {"device": "GPU-a", "namespace": "default", "container": "main"}
    assert status["limits"] == [
        whose | {"uid": UIDS[0], "name": "limited", "containerId": whole.container_id(UIDS[0])}
        | {"used": 3 * GIB, "soft": 2 * GIB, "hard": 8 * GIB},
        whose | {"uid": UIDS[1], "name": "counted", "containerId": whole.container_id(UIDS[1])}
        | {"used": GIB},
    ]  # fmt: skip
    # The use of a pod is still the sum of its processes.
    assert {p["name"]: p["used"] for p in status["pods"]} == dict.fromkeys(
        ("limited", "counted", "neither"), GIB
    )
    lines = whole.once("--pause", "0").stdout.splitlines()
    assert [" ".join(line.split()) for line in lines if " of default/" in line] == [
        "limit of default/limited main, soft 2.0 GiB 8.0 GiB 3.0 GiB",
        "count of default/counted main 1.0 GiB",
    ]


@pytest.mark.slow  # starts an agent
def test_a_driver_before_r615_is_reported_to_have_no_limits(whole: Whole) -> None:
    whole.missing = (CALL,)
    status = reported(whole, "--pause", "0.1")
    assert source(status) == (
        "absent",
        "this driver does not support memory limits; r615 and newer do",
    )
    assert "limits" not in status
    assert all(pod["used"] == GIB for pod in status["pods"])


def ids(readings: list[Reading]) -> list[str]:
    return [r.container_id for r in readings if isinstance(r, LimitReading)]


@pytest.mark.parametrize(
    "below",
    [
        pytest.param(
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/"
            "cri-containerd-{container}.scope",
            id="systemd, containerd",
        ),
        pytest.param(
            "kubepods.slice/kubepods-pod{slice}.slice/crio-{container}.scope", id="systemd, CRI-O"
        ),
        pytest.param("kubepods/besteffort/pod{uid}/{container}", id="cgroupfs"),
        pytest.param(
            "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/"
            "kubelet-kubepods-burstable-pod{slice}.slice/cri-containerd-{container}.scope",
            id="kind",
        ),
    ],
)
def test_containers_are_found_in_the_cgroups_of_each_kubelet_version(
    probe: Callable[..., LimitsProbe], tmp_path: Path, below: str
) -> None:
    container = "c" * 64
    for uid, name in ((UIDS[1], container), (UIDS[2], "d" * 64)):
        words = {"uid": uid, "slice": uid.replace("-", "_"), "container": name}
        (tmp_path / below.format(**words) / "nested").mkdir(parents=True)
    (tmp_path / f"system.slice/pod{UIDS[1]}/{'e' * 64}").mkdir(parents=True)
    assert ids(probe(granting(5)).follow(SAMPLE)) == [container]


def some_pod(root: Path) -> None:
    (root / f"kubepods/pod{UIDS[1]}/{'c' * 64}").mkdir(parents=True)


def test_limits_are_read_rarely_and_only_for_existing_pods(tmp_path: Path) -> None:
    some_pod(tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    now_s, calls = [0.0], []

    def limits(device: str, asked: Any) -> None:
        calls.append(device)
        granting(len(calls))(device, asked)

    (tmp_path / f"kubepods/pod{UIDS[2]}/{'d' * 64}").mkdir(parents=True)
    both = [*SAMPLE, held(UIDS[2], "A::1")]
    probing = LimitsProbe(Gate(library(limits)), 30.0, tmp_path, 15.0, lambda: now_s[0])
    try:
        first = probing.follow(both)
        assert (sorted(ids(first)), len(calls)) == (["c" * 64, "d" * 64], 2)
        now_s[0] = 14.9
        assert probing.follow(both) == first
        assert ids(probing.follow(SAMPLE)) == ["c" * 64]  # The other pod was deleted.
        assert len(calls) == 2
        now_s[0] = 15.0
        assert len(ids(probing.follow(both))) == 2
        assert len(calls) == 4
    finally:
        probing.close()


def test_a_hanging_call_leaves_out_only_the_limits(
    probe: Callable[..., LimitsProbe], tmp_path: Path
) -> None:
    some_pod(tmp_path)
    ended = threading.Event()

    def limits(device: str, asked: Any) -> None:
        ended.wait()
        granting(5)(device, asked)

    hanging = probe(limits, deadline_s=0.2)
    readers = begun_since("limits")
    for _ in range(3):
        assert hanging.follow(SAMPLE) == [
            SourceReading("limits", "degraded", f"driver call {CALL} hangs")
        ]
        assert hanging.hanging
    assert readers() == ["limits"]
    ended.set()
    until(lambda: ids(hanging.follow(SAMPLE)), "the limits are read")
    assert not hanging.hanging


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        pytest.param(3, [], id="unsupported"),
        pytest.param(999, [Degraded("limits", "A: Unknown Error (NVML 999)")], id="failed"),
    ],
)
def test_a_failed_call_is_reported_and_an_unsupported_call_is_not_a_fault(
    probe: Callable[..., LimitsProbe], tmp_path: Path, code: int, shown: list[Reading]
) -> None:
    some_pod(tmp_path)
    assert probe(refusing(code)).follow(SAMPLE) == [SourceReading("limits"), *shown]


def test_an_unreadable_container_hides_no_other(
    probe: Callable[..., LimitsProbe], tmp_path: Path
) -> None:
    for name in ("c", "d", "e"):
        (tmp_path / f"kubepods/pod{UIDS[1]}/{name * 64}").mkdir(parents=True)
    calls = []

    def limits(device: str, asked: Any) -> None:
        calls.append(device)
        (refusing(999) if len(calls) == 2 else granting(5))(device, asked)

    found = probe(limits).follow(SAMPLE)
    assert len(ids(found)) == 2
    assert Degraded("limits", "A: Unknown Error (NVML 999)") in found


def test_cgroups_in_another_namespace_are_reported(
    probe: Callable[..., LimitsProbe], tmp_path: Path
) -> None:
    why = f"no pod's cgroup is in {tmp_path}: mount the host's /sys/fs/cgroup there"
    asking = probe(mistaken)
    assert asking.follow(SAMPLE) == [SourceReading("limits", "degraded", why)]
    # A pod that was just admitted has no cgroup yet, but other pods have.
    (tmp_path / f"kubepods/pod{UIDS[3]}").mkdir(parents=True)
    assert asking.follow(SAMPLE) == [SourceReading("limits")]
    (tmp_path / "cgroup.controllers").unlink()
    why = f"{tmp_path} has no cgroups (v2)"
    assert asking.follow(SAMPLE) == [SourceReading("limits", "absent", why)]


def refusing(code: int) -> Callable[..., None]:
    def reject(*args: object) -> None:
        raise pynvml.NVMLError(code)

    return reject


def mistaken(*args: object) -> None:
    raise KeyError("a mistake of ours")


@pytest.mark.parametrize(
    "limits",
    [*map(refusing, range(30)), mistaken, granting(2**64 - 1)],
    ids=[*map(str, range(30)), "a bug in Headroom", "more than the memory"],
)
def test_no_error_is_raised(
    probe: Callable[..., LimitsProbe], tmp_path: Path, limits: Callable[..., None]
) -> None:
    some_pod(tmp_path)
    with capture_logs():
        found = probe(limits).follow(SAMPLE)
    assert any(isinstance(each, SourceReading) for each in found)
    kinds = (SourceReading, Degraded, LimitReading)
    assert all(isinstance(each, kinds) for each in found)


def test_a_pynvml_with_changed_internals_is_reported(tmp_path: Path) -> None:
    changed = library(mistaken)
    del changed._nvmlGetFunctionPointer
    with capture_logs():
        found = LimitsProbe(Gate(changed), 30.0, tmp_path).follow(SAMPLE)
    why = "the agent cannot read the limits: AttributeError"
    assert found == [SourceReading("limits", "degraded", why)]


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param([DriverReading("nvml", why_not="none"), *SAMPLE[1:]], id="no driver"),
        pytest.param(SAMPLE[:2], id="no pod"),
        pytest.param(
            [SAMPLE[0], DeviceReading("nvml", "A", 0, fault="lost"), SAMPLE[2]], id="lost"
        ),
        pytest.param([SAMPLE[0], DeviceReading("nvml", "A", 0, kind="mig"), SAMPLE[2]], id="MIG"),
    ],
)
def test_no_call_is_made_if_there_can_be_no_limit(
    probe: Callable[..., LimitsProbe], tmp_path: Path, sample: list[Reading]
) -> None:
    some_pod(tmp_path)
    assert probe(mistaken).follow(sample) == []


def limit(uid: str, container_id: str) -> LimitReading:
    return LimitReading("limits", "A", uid, container_id, 5)


def names(holdings: list[HoldingReading], *limits: LimitReading) -> list[tuple[str, str]]:
    mirror = MirrorReading("mirrors", HASH, "mirror", "ns", "p")
    found = container_limits([DeviceReading("nvml", "A", 0)], holdings, [mirror], limits)
    return [(each.uid, each.container) for each in found]


def test_a_container_is_named_only_if_its_name_is_certain() -> None:
    two = [held("u"), held("u", "A::1", "side")]
    assert names([held("u")], limit("u", "c1")) == [("u", "main")]
    assert names(two, limit("u", "c1"), limit("u", "c2")) == [("u", ""), ("u", "")]
    assert names(two, limit("u", "c1")) == [("u", "")]
    assert names([held("u")], limit("u", "c1"), limit("u", "c2")) == [("u", ""), ("u", "")]
    assert names([held(HASH)], limit(HASH, "c1")) == [("mirror", "main")]
