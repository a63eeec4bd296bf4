"""Tests that XIDs make devices unhealthy, with the fake driver library and a fake dcgm-exporter."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import Survey
from tests.agent.exporter import StandIn, recorded
from tests.driver import Gpu, Instance, b200, h100

Start = Callable[..., Survey]
Status = dict[str, Any]

FENCED = "XID 79 (nvml): unhealthy until the GPU is reset or the driver is loaded again"


@pytest.fixture
def exporter() -> Iterator[StandIn]:
    with StandIn().serving() as serving:
        yield serving


def reasons(status: Status) -> dict[str, str]:
    """Return the reason of each unhealthy device by UUID."""
    return {d["uuid"]: d["healthReason"] for d in status["devices"] if not d.get("healthy", True)}


def unhealthy(status: Status) -> bool:
    return bool(reasons(status))


def since(status: Status) -> set[str]:
    return {d["unhealthySince"] for d in status["devices"] if "unhealthySince" in d}


def test_an_xid_makes_its_gpu_with_all_mig_devices_unhealthy_and_no_other(survey: Start) -> None:
    instances = (Instance("MIG-1", 1), Instance("MIG-2", 2))
    agent = survey([Gpu("GPU-a", instances=instances), h100("GPU-b")])
    agent.step()
    agent.driver.fail("GPU-a", 79)
    assert reasons(agent.until(unhealthy)) == {"MIG-1": FENCED, "MIG-2": FENCED}
    assert len(since(agent.step())) == 1


def test_a_device_stays_healthy_after_a_harmless_xid(survey: Start) -> None:
    agent = survey([h100("GPU-a"), h100("GPU-b")])
    agent.step()
    for xid in (13, 31, 43, 45, 68, 63, 92, 94, 121, 154):
        agent.driver.fail("GPU-a", xid)
    agent.driver.fail("GPU-b", 48)  # This XID is received after the other XIDs.
    assert list(reasons(agent.until(unhealthy))) == ["GPU-b"]


def test_an_unhealthy_state_survives_the_agent_and_ends_with_the_driver(
    survey: Start, tmp_path: Path
) -> None:
    state = ("--state", str(tmp_path / "run" / "state.json"))
    agent = survey([h100("GPU-a")], *state)
    agent.step()
    agent.driver.fail("GPU-a", 79)
    before = agent.until(unhealthy)
    agent.end()
    again = survey(agent.driver, *state)
    after = again.step()  # The driver does not report the XID to the new agent.
    assert reasons(after) == {"GPU-a": FENCED}
    assert since(after) == since(before)
    again.end()
    agent.driver.say("", "driver 615.10.02")
    assert not unhealthy(survey(agent.driver, *state).step())


def test_without_a_state_file_a_restart_loses_the_unhealthy_state(survey: Start) -> None:
    agent = survey([h100("GPU-a")])
    agent.step()
    agent.driver.fail("GPU-a", 79)
    agent.until(unhealthy)
    assert not unhealthy(survey(agent.driver).step())


def test_an_unreadable_or_unwritable_file_is_reported(survey: Start, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("{garbage")
    agent = survey([h100("GPU-a")], "--state", str(tmp_path / "state"))
    (xid,) = [s for s in agent.step()["sources"] if s["name"] == "xid"]
    assert "cannot be read, so earlier XIDs are unknown" in xid["message"]
    other = survey(agent.driver, "--state", "/proc/nowhere/state")
    (xid,) = [s for s in other.step()["sources"] if s["name"] == "xid"]
    assert "cannot be written, so XIDs are lost at a restart" in xid["message"]


def test_a_device_is_healthy_again_when_the_driver_requires_no_recovery(survey: Start) -> None:
    # The agent receives XIDs, because the other device is healthy.
    agent = survey([h100("GPU-a"), h100("GPU-b")])
    agent.driver.say("GPU-a", "recovery 1")
    agent.step()
    agent.driver.fail("GPU-a", 95)
    status = agent.until(lambda status: "XID 95" in reasons(status)["GPU-a"])
    assert reasons(status)["GPU-a"].startswith("driver asks for a GPU reset; XID 95 (nvml)")
    agent.driver.say("GPU-a", "recovery 0")
    assert not unhealthy(agent.step())


def test_a_device_is_healthy_again_after_maintenance_of_the_node(survey: Start) -> None:
    """The driver does not report a recovery action."""
    agent = survey([h100("GPU-a")])
    agent.step()
    agent.driver.fail("GPU-a", 95)
    agent.until(unhealthy)
    agent.ask("maintain a reset")
    agent.step()
    agent.ask("maintain")
    assert not unhealthy(agent.until(lambda status: not unhealthy(status)))
    assert not unhealthy(agent.step())


def test_an_xid_seen_only_by_dcgm_counts_once(survey: Start, exporter: StandIn) -> None:
    text = recorded("4.6.0-renamed")
    exporter.text = re.sub(r"(?m)^(DCGM_FI_DEV_XID_ERRORS.*) 79$", r"\1 0", text)
    assert exporter.text != text
    agent = survey(
        [b200("GPU-a"), b200("GPU-b")], "--dcgm-url", exporter.url, "--dcgm-interval", "0.05"
    )
    agent.until(lambda status: any(s["name"] == "dcgm" for s in status["sources"]))
    assert not unhealthy(agent.step())
    exporter.text = text
    assert reasons(agent.until(unhealthy)) == {
        "GPU-b": "XID 79 (dcgm): unhealthy until the GPU is reset or the driver is loaded again"
    }
    # After the reset, the exporter still shows the XID until the exporter is restarted.
    agent.driver.say("GPU-b", "recovery 1")
    agent.until(lambda status: "asks for" in reasons(status)["GPU-b"])
    agent.driver.say("GPU-b", "recovery 0")
    agent.until(lambda status: not unhealthy(status))
    assert not unhealthy(agent.step())


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("nvmlDeviceGetSupportedEventTypes 3", "the driver does not support them"),
        ("nvmlDeviceRegisterEvents 3", "the driver does not register them"),
        ("nvmlDeviceRegisterEvents 4", "the driver does not register them"),
    ],
)
def test_devices_without_events_are_reported(survey: Start, fails: str, why: str) -> None:
    agent = survey([h100("GPU-a"), h100("GPU-b")])
    agent.driver.say("GPU-a", f"fail {fails}")

    def shown(status: Status) -> bool:
        (xid,) = [s for s in status["sources"] if s["name"] == "xid"]
        return xid.get("message") == f"no XID events of GPU-a: {why}"

    agent.until(shown)
    agent.driver.fail("GPU-b", 79)
    assert reasons(agent.until(unhealthy)) == {"GPU-b": FENCED}
