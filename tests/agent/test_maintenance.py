"""Checks that the agent closes the driver for maintenance and opens it again afterwards."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.probes.node_probe import of_maintenance
from agent.probes.readings import DriverReading
from agent.status_builder import summarise
from tests.agent.conftest import Survey
from tests.controlplane import ControlPlane
from tests.driver import Driver, h100

Start = Callable[..., Survey]

LABEL = "nvidia.com/gpu.deploy.device-plugin"
ANNOTATION = "headroom.gpu/maintenance"
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
GPUNODE = {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode"}


def ready(status: dict[str, Any]) -> tuple[str, str]:
    (found,) = [c for c in status["conditions"] if c["type"] == "DriverReady"]
    return found["status"], found.get("message", "")


def opened(agent: Survey) -> bool:
    return bool(agent.ask("opened")["opened"])


def test_the_driver_is_closed_for_maintenance_and_opened_afterwards(survey: Start) -> None:
    agent = survey([h100("GPU-a"), h100("GPU-b")])
    assert ready(agent.step()) == ("True", "")
    assert opened(agent)
    agent.ask("maintain annotation x is true")
    status = agent.until(lambda status: ready(status)[1].startswith("driver is released"))
    assert ready(status) == ("False", "driver is released: annotation x is true")
    assert not opened(agent)
    assert agent.ask("vitals")["samples"] == 0
    assert {(d["uuid"], d["healthReason"]) for d in status["devices"]} == {
        (uuid, "the driver is released: annotation x is true") for uuid in ("GPU-a", "GPU-b")
    }
    assert not any(d["healthy"] for d in status["devices"])
    agent.ask("steps 3")
    assert not opened(agent)
    agent.ask("maintain")
    status = agent.step()
    assert ready(status) == ("True", "")
    assert all(d.get("healthy", True) for d in status["devices"])


def test_kubectl_shows_why_the_driver_does_not_answer(plane: ControlPlane) -> None:
    plane.call("POST", GPUNODES, {**GPUNODE, "metadata": {"name": "maintained"}})
    why = "driver is released: annotation headroom.gpu/maintenance is true"
    status = summarise([DriverReading("nvml", why_not=why)], datetime.now(UTC))
    patch = {"status": msgspec.to_builtins(status)}
    path = f"{GPUNODES}/maintained/status"
    plane.call("PATCH", path, patch)
    head, row = plane.kubectl("get", "gn", "maintained").splitlines()
    assert row[head.index("DRIVER") :].split()[0] == "False"
    assert why in plane.kubectl("get", "gn", "maintained", "-o", "wide")


def test_a_driver_replaced_during_maintenance_is_used_by_a_new_process(survey: Start) -> None:
    agent = survey([h100("GPU-a")])
    agent.step()
    agent.ask("maintain an upgrade")
    agent.until(lambda status: ready(status)[1].startswith("driver is released"))
    agent.driver.say("", "driver 590.1", "library 580.95.05")
    agent.ask("maintain")
    assert "restarts itself" in ready(agent.step())[1]


@pytest.mark.parametrize("shown", ["fail all 15", "fail all 16", "recovery 1"])
def test_lost_gpus_are_closed_and_found_again_when_they_return(survey: Start, shown: str) -> None:
    agent = survey([h100("GPU-a"), h100("GPU-b")])
    agent.step()
    agent.driver.say("GPU-a", shown)
    agent.step()
    assert opened(agent)  # The agent must receive the errors of the other GPU, which is in use.
    agent.driver.say("GPU-b", shown)
    agent.step()
    status = agent.until(lambda _: not opened(agent))
    assert [d["healthy"] for d in status["devices"]] == [False, False]
    for uuid in ("GPU-a", "GPU-b"):
        agent.driver.say(uuid, "recovery 0")
    status = agent.step()
    assert all(d.get("healthy", True) for d in status["devices"]), status
    assert opened(agent)


def test_gpus_that_appear_after_the_agent_started_are_found(survey: Start) -> None:
    """The driver counts the GPUs when it is opened, so the agent opens it again."""
    agent = survey([])
    status = agent.step()
    assert (ready(status), "devices" in status) == (("True", ""), False)
    agent.driver.add(h100("GPU-a"))
    status = agent.until(lambda status: "devices" in status)
    assert [d["uuid"] for d in status["devices"]] == ["GPU-a"]


def test_a_driver_loaded_after_the_agent_started_is_found(
    survey: Start, environment: dict[str, str]
) -> None:
    driver = Driver(Path(environment["FAKE_NVML_TABLE"]), [h100("GPU-a")])
    driver.say("", "driver none")
    agent = survey(driver)
    assert ready(agent.step())[0] == "False"
    driver.say("")
    status = agent.step()
    assert (ready(status)[0], [d["uuid"] for d in status["devices"]]) == ("True", ["GPU-a"])


def test_a_driver_library_installed_after_the_agent_started_is_found(
    survey: Start, environment: dict[str, str], tmp_path: Path
) -> None:
    library = Path(environment["LD_LIBRARY_PATH"]) / "libnvidia-ml.so.1"
    (folder := tmp_path / "lib").mkdir()
    environment["LD_LIBRARY_PATH"] = str(folder)
    agent = survey([h100("GPU-a")], fork=False)
    assert "Shared Library Not Found" in ready(agent.step())[1]
    shutil.copy(library, folder)
    status = agent.step()
    assert (ready(status)[0], [d["uuid"] for d in status["devices"]]) == ("True", ["GPU-a"])


@pytest.mark.parametrize(
    ("labels", "annotations", "expected"),
    [
        ({}, {}, None),
        ({LABEL: "true"}, {}, None),
        ({LABEL: "false"}, {}, None),
        (
            {LABEL: "paused-for-driver-upgrade"},
            {},
            ("gpu_operator", f"label {LABEL} is paused-for-driver-upgrade"),
        ),
        (
            {LABEL: "paused-for-mig-change"},
            {},
            ("gpu_operator", f"label {LABEL} is paused-for-mig-change"),
        ),
        ({}, {ANNOTATION: "true"}, ("maintenance", f"annotation {ANNOTATION} is true")),
        ({}, {ANNOTATION: "false"}, None),
        ({}, {ANNOTATION: "later"}, None),
    ],
)
def test_the_agent_recognises_requests_to_release_the_driver(
    labels: dict[str, str], annotations: dict[str, str], expected: tuple[str, str] | None
) -> None:
    why = of_maintenance(labels, annotations)
    assert (why and (why.code, why)) == expected
