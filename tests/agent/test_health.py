"""Tests which devices are unhealthy, and when they recover."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.probes.device_health import Checkup, HealthSample, HealthState, Xid, judge

#: XIDs that do not make a device unhealthy.
HARMLESS = (13, 31, 43, 45, 63, 68, 92, 94, 121, 154)
FATAL = Xid("GPU-a", 79, "nvml")
WELL: dict[str, list[str]] = {"GPU-a": [], "GPU-b": []}


def sight(now: str = "t0", driver: str = "boot/1/580", **more: object) -> HealthSample:
    return HealthSample(now=now, driver=driver, **{"causes": WELL, **more})  # type: ignore[arg-type]


def test_a_current_cause_makes_a_device_unhealthy_until_the_cause_ends() -> None:
    memory, health_issues = judge(HealthState(), sight("t0", causes={"GPU-a": ["GPU is lost"]}))
    assert (health_issues["GPU-a"].reason, health_issues["GPU-a"].since) == ("GPU is lost", "t0")
    memory, health_issues = judge(memory, sight("t1", causes={"GPU-a": ["reset", "remap"]}))
    assert (health_issues["GPU-a"].reason, health_issues["GPU-a"].since) == ("reset; remap", "t0")
    memory, health_issues = judge(memory, sight("t2"))
    assert health_issues == {}
    assert memory.unhealthy == {}
    assert judge(memory, sight("t3", causes={"GPU-a": ["lost"]}))[1]["GPU-a"].since == "t3"


def test_an_xid_is_remembered_until_the_driver_is_replaced() -> None:
    memory, _ = judge(HealthState(), sight(xids=[FATAL]))
    for driver in (
        "boot/1/580",
        "",
        "boot/1/580",
    ):  # An empty string means that the driver does not answer.
        memory, health_issues = judge(memory, sight(driver=driver))
        assert list(health_issues) == ["GPU-a"]
    for other in ("boot/2/580", "again/1/580", "boot/1/590"):
        assert judge(memory, sight(driver=other))[1] == {}


def test_an_xid_in_the_first_sample_of_a_replaced_driver_counts() -> None:
    memory, _ = judge(HealthState(), sight())
    assert list(judge(memory, sight(driver="boot/2/580", xids=[FATAL]))[1]) == ["GPU-a"]


def test_a_device_that_is_missing_for_a_while_stays_unhealthy() -> None:
    memory, _ = judge(HealthState(), sight(xids=[FATAL]))
    memory, health_issues = judge(memory, sight(causes={"GPU-b": []}))
    assert health_issues == {}
    assert list(judge(memory, sight())[1]) == ["GPU-a"]


def test_an_xid_without_a_device_makes_all_devices_unhealthy() -> None:
    assert sorted(judge(HealthState(), sight(xids=[Xid(None, 79, "nvml")]))[1]) == [
        "GPU-a",
        "GPU-b",
    ]


def test_many_xids_and_causes_stay_within_the_limits_of_the_crd() -> None:
    many = [Xid("GPU-a", number, "nvml") for number in range(100, 1000)]
    memory, health_issues = judge(
        HealthState(), sight(xids=many, causes={"GPU-a": ["x" * 600] * 3})
    )
    assert len(health_issues["GPU-a"].reason) <= 1024
    assert len(memory.unhealthy["GPU-a"].xids) == 16
    assert judge(memory, sight())[1]["GPU-a"].reason.startswith("XID 100 (nvml), 101 (nvml), ")


ASKED, QUIET = {"GPU-a": Checkup(recovery=1)}, {"GPU-a": Checkup(recovery=0)}


def test_the_recovery_action_of_the_driver_decides() -> None:
    """A fatal XID makes the device unhealthy immediately, and for as long as the driver confirms
    the fault.
    """
    memory, health_issues = judge(HealthState(), sight(checkups=QUIET, xids=[FATAL]))
    assert health_issues["GPU-a"].reason.endswith("unhealthy until the driver asks for no recovery")
    memory, health_issues = judge(memory, sight(checkups=ASKED, causes={"GPU-a": ["it asks"]}))
    assert health_issues["GPU-a"].reason.startswith("it asks; XID 79")
    memory, health_issues = judge(memory, sight(checkups=QUIET))
    assert health_issues == {}
    assert memory.unhealthy == {}


@pytest.mark.parametrize("number", HARMLESS)
@pytest.mark.parametrize("recovery", [None, 0])
def test_an_xid_after_which_the_device_works_is_ignored(number: int, recovery: int | None) -> None:
    checkups = {"GPU-a": Checkup(recovery=recovery)}
    received = sight(checkups=checkups, xids=[Xid("GPU-a", number, "nvml")])
    assert judge(HealthState(), received)[1] == {}


def test_a_late_event_does_not_undo_a_repair() -> None:
    """The events are XID 95, a reset, and then XID 154, which requests no further action."""
    memory, health_issues = judge(
        HealthState(), sight(checkups=QUIET, xids=[Xid("GPU-a", 95, "nvml")])
    )
    assert health_issues
    memory, health_issues = judge(memory, sight(checkups=ASKED, causes={"GPU-a": ["a GPU reset"]}))
    assert health_issues
    memory, health_issues = judge(memory, sight(checkups=QUIET, xids=[Xid("GPU-a", 154, "nvml")]))
    assert health_issues == {}
    assert memory.unhealthy == {}


def test_the_end_of_maintenance_is_a_repair_if_the_driver_reports_no_recovery_action() -> None:
    memory, health_issues = judge(HealthState(), sight(xids=[FATAL]))
    assert health_issues
    memory, health_issues = judge(memory, sight(maintained=True))
    assert health_issues == {}
    memory, health_issues = judge(memory, sight(maintained=True, causes={"GPU-a": ["GPU is lost"]}))
    assert health_issues["GPU-a"].reason == "GPU is lost"


def test_a_driver_without_recovery_actions_confirms_no_repair() -> None:
    memory, _ = judge(HealthState(), sight(checkups={"GPU-a": Checkup(recovery=1)}, xids=[FATAL]))
    assert judge(memory, sight(checkups={"GPU-a": Checkup()}))[1]
    assert judge(memory, sight())[1]


@pytest.mark.parametrize(
    ("gauge", "unhealthy"), [([0, 79], True), ([79], False), ([31], False), ([0], False)]
)
def test_a_changed_xid_gauge_of_dcgm_counts(gauge: list[int], unhealthy: bool) -> None:
    memory = HealthState()
    for value in gauge:
        memory, health_issues = judge(memory, sight(gauges={"GPU-a": value}))
    assert bool(health_issues) is unhealthy
    memory, health_issues = judge(memory, sight(driver="boot/2/580", gauges={"GPU-a": gauge[-1]}))
    assert health_issues == {}


def test_each_gpu_instance_has_its_own_xid_gauge() -> None:
    """A harmless XID of one instance does not hide an XID of another instance with a smaller
    number.
    """
    before = {"GPU-a/1": 94, "GPU-a/2": 0, "GPU-a": 0}
    memory, health_issues = judge(HealthState(), sight(gauges=before))
    assert health_issues == {}
    memory, health_issues = judge(memory, sight(gauges=before | {"GPU-a/2": 79}))
    assert health_issues["GPU-a"].reason.startswith("XID 79 (dcgm)")
    assert judge(memory, sight(checkups=QUIET, gauges=before | {"GPU-a/2": 79}))[1] == {}


@pytest.mark.parametrize(
    ("checkup", "causes"),
    [
        (Checkup(uncorrected_errors=1), ["uncorrectable ECC errors since the driver was loaded"]),
        (Checkup(uncorrected_errors=1, recovery=0), []),
        (Checkup(uncorrected_errors=1, recovery=1), ["driver asks for a GPU reset"]),
    ],
)
def test_after_a_contained_error_the_recovery_action_decides(
    checkup: Checkup, causes: list[str]
) -> None:
    """The driver counts a contained error as uncorrectable until the next reset."""
    assert checkup.causes == causes
    sample = sight(
        checkups={"GPU-a": checkup},
        causes={"GPU-a": checkup.causes},
        xids=[Xid("GPU-a", 94, "nvml")],
    )
    assert list(judge(HealthState(), sample)[1]) == (["GPU-a"] if causes else [])


@pytest.mark.parametrize(
    ("checkup", "cause"),
    [
        (Checkup(uncorrected_errors=2), "ECC"),
        (Checkup(remap_pending=True), "remap is pending"),
        (Checkup(remap_failed=True), "remap failed"),
        (Checkup(pages_pending=True), "retirement is pending"),
        (Checkup(recovery=2), "asks for a reboot of the node"),
        (Checkup(recovery=99), "asks for a recovery"),
    ],
)
def test_each_fault_that_the_driver_reports_is_a_cause(checkup: Checkup, cause: str) -> None:
    (found,) = checkup.causes
    assert cause in found


def test_unreported_values_are_not_a_cause() -> None:
    assert Checkup().causes == []
    assert Checkup(0, False, False, False, 0).causes == []


UUID = st.sampled_from(["GPU-a", "GPU-b"])
SIGHT = st.builds(
    HealthSample,
    now=st.sampled_from(["t1", "t2"]),
    driver=st.sampled_from(["", "d1", "d2"]),
    causes=st.dictionaries(UUID, st.lists(st.sampled_from(["lost", "hangs"]), max_size=2)),
    checkups=st.dictionaries(UUID, st.builds(Checkup, recovery=st.sampled_from([None, 0, 1]))),
    xids=st.lists(st.builds(Xid, UUID | st.none(), st.sampled_from([13, 79]), st.just("nvml"))),
    gauges=st.dictionaries(
        st.sampled_from(["GPU-a", "GPU-b", "GPU-a/1"]), st.sampled_from([0, 31, 79])
    ),
)


@given(st.lists(SIGHT, max_size=6))
def test_every_unhealthy_device_has_a_cause_and_every_cause_a_device(
    sights: list[HealthSample],
) -> None:
    memory = HealthState()
    for each in sights:
        memory, health_issues = judge(memory, each)
        assert set(health_issues) <= set(each.causes)
        for uuid, causes in each.causes.items():
            received = [x for x in each.xids if x.uuid in {uuid, None}]
            if causes or any(x.number not in HARMLESS for x in received):
                assert uuid in health_issues
            if uuid in health_issues:
                assert health_issues[uuid].reason
                assert memory.unhealthy[uuid].since == health_issues[uuid].since
