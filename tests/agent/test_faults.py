"""Simulates every fault of the driver and the exporter, and checks the effect of each fault on the
report.

docs/design/agent.md contains the same table, and the test checks it.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import Survey
from tests.agent.exporter import Manner, StandIn
from tests.agent.stepper import EXPORTER_TIMEOUT_S
from tests.driver import GIB, Driver, h100, t4

TIMEOUT_S = 3.0

Start = Callable[..., Survey]
Inject = Callable[[Driver, StandIn], None]

DOCS = Path(__file__).parents[2] / "docs/design/agent.md"
BAD, GOOD, OLD = "GPU-bad", "GPU-good", "GPU-old"


#: Statements that make the driver report a healthy GPU.
ALWAYS = {BAD: ("sm 10 10",), OLD: (), "": ()}


def on(uuid: str, *statements: str) -> Inject:
    return lambda driver, exporter: driver.say(uuid, *ALWAYS[uuid], *statements)


def exporting(text: str = "", status: int = 200, manner: Manner = "answer") -> Inject:
    def inject(driver: Driver, exporter: StandIn) -> None:
        exporter.text, exporter.status, exporter.manner = text, status, manner

    return inject


def contradict(driver: Driver, exporter: StandIn) -> None:
    driver.use(1, {BAD: -100 * GIB})


WELL = "".join(f'DCGM_FI_PROF_SM_ACTIVE{{UUID="{uuid}"}} 0.5\n' for uuid in (BAD, GOOD, OLD))

#: How messages describe the exporter's timeout in these tests, and the default timeout.
TIMEOUTS = f"within {EXPORTER_TIMEOUT_S:g} s", f"within {TIMEOUT_S:g} s"
#: Parts of the names of faults in which the exporter responds too late.
LATE = ("never answers", "byte by byte")

#: Simulates each fault. A fault ends when the simulation stops, unlike an XID.
FAULTS: list[tuple[str, Inject]] = [
    ("the GPU fell off the bus", on(BAD, "fail all 15")),
    ("a call answers that the GPU needs a reset", on(BAD, "fail nvmlDeviceGetTotalEccErrors 16")),
    ("the memory call fails with UNKNOWN", on(BAD, "fail nvmlDeviceGetMemoryInfo_v2 999")),
    ("the memory call fails with an unknown code", on(BAD, "fail nvmlDeviceGetMemoryInfo_v2 777")),
    (
        "the memory call is not supported",
        on(BAD, "fail nvmlDeviceGetMemoryInfo_v2 3", "fail nvmlDeviceGetMemoryInfo 3"),
    ),
    ("no permission for the memory call", on(BAD, "fail nvmlDeviceGetMemoryInfo_v2 4")),
    ("more free memory than total memory", contradict),
    ("the memory call hangs", on(BAD, "stuck nvmlDeviceGetMemoryInfo_v2")),
    ("every call for the GPU hangs", on(BAD, "stuck all")),
    ("process lists fail", on(BAD, "fail nvmlDeviceGetComputeRunningProcesses_v3 999")),
    ("GPM fails", on(BAD, "fail nvmlGpmSampleGet 999")),
    ("process samples fail", on(BAD, "fail nvmlDeviceGetProcessUtilization 999")),
    ("uncorrectable ECC errors", on(BAD, "ecc 3")),
    ("a row remap is pending", on(BAD, "remap 1 0")),
    ("a row remap failed", on(BAD, "remap 0 1")),
    ("pages are to be retired (T4)", on(OLD, "pages 1")),
    ("the driver asks for a reset", on(BAD, "recovery 1")),
    ("the driver asks for a reboot", on(BAD, "recovery 2")),
    ("the wait for events fails", on("", "code nvmlEventSetWait_v2 999")),
    ("the wait for events hangs", on("", "hang nvmlEventSetWait_v2")),
    ("the device count hangs", on("", "hang nvmlDeviceGetCount_v2")),
    ("the device count fails with UNKNOWN", on("", "code nvmlDeviceGetCount_v2 999")),
    ("the driver was replaced", on("", "driver 615.10.02")),
    ("the driver was unloaded", on("", "driver none")),
    ("the exporter answers 503", exporting(status=503)),
    ("the exporter never answers", exporting(manner="silent")),
    ("the exporter answers byte by byte", exporting(manner="drip body")),
    ("the exporter's answer is endless", exporting(manner="endless")),
    ("the exporter does not speak HTTP", exporting(manner="not http")),
    ("the exporter's answer has no metrics", exporting("<html>hello</html>\n")),
    ("the exporter is that of another node", exporting(WELL.replace(BAD, "GPU-else"))),
    ("the exporter's values are invalid", exporting(WELL + WELL.replace("0.5", "NaN"))),
    (
        "the exporter has no profiling counters",
        exporting(WELL.replace("PROF_SM_ACTIVE", "DEV_FB_USED")),
    ),
]


@pytest.fixture
def exporter() -> Iterator[StandIn]:
    with StandIn().serving() as serving:
        yield serving


def codes(source: dict[str, Any]) -> str:
    found = source.get("codes")
    return f" ({', '.join(found)})" if found else ""


def messages(status: dict[str, Any], fault: str = "") -> list[str]:
    """Return the messages of all faults in a status.

    Messages about the XIDs of a lost device are ignored, because they may arrive late. Messages
    about a late exporter are ignored except for faults in ``LATE``, because an exporter without a
    fault can be late on a busy machine.
    """
    beside = ("xid",) if "bus" in fault else ()
    found = [
        f"`{d['uuid']}` unhealthy ({', '.join(d['healthCodes'])}): {d['healthReason']}"
        for d in status.get("devices", ())
        if not d.get("healthy", True)
    ]
    found += [
        f"{c['type']} {c['status']}: {c['message']}"
        for c in status["conditions"]
        if c["status"] != "True"
        and c["type"] != "Complete"  # This condition repeats the faults of sources.
    ]
    found += [
        f"source {s['name']} {s['state']}{codes(s)}: {s['message']}"
        for s in status["sources"]
        if s.get("state", "ok") != "ok" and s["name"] not in beside
    ]
    is_late = any(part in fault for part in LATE)
    return [each for each in found if is_late or TIMEOUTS[0] not in each]


def test_every_fault_is_reported_until_it_ends_as_the_table_in_the_docs_shows(
    survey: Start, exporter: StandIn
) -> None:
    exporter.text = WELL
    agent = survey(
        [h100(BAD), h100(GOOD), t4(OLD)],
        *("--driver-timeout", "0.5", "--dcgm-url", exporter.url, "--dcgm-interval", "0.05"),
    )
    agent.driver.say(BAD, *ALWAYS[BAD])
    rows = []
    for fault, inject in FAULTS:
        agent.until(lambda status: not messages(status))
        inject(agent.driver, exporter)
        # Wait, because some faults are reported in steps, and on a busy machine a call can be late.
        status = agent.until(settled(fault))
        assert any(d["uuid"] == GOOD for d in status["devices"])
        shown = "<br>".join(messages(status, fault))
        complete = next(c["status"] for c in status["conditions"] if c["type"] == "Complete")
        lacking = any(s.get("state") == "degraded" for s in status["sources"])
        assert (complete == "False") == lacking, fault
        rows.append(f"| {fault} | {shown.replace(*TIMEOUTS)} |")
        agent.driver.use(1, {})
        for uuid, statements in ALWAYS.items():
            agent.driver.say(uuid, *statements)
        exporting(WELL)(agent.driver, exporter)
    agent.until(lambda status: not messages(status))
    agent.driver.fail(BAD, 79)  # This fault comes last, because it does not end by itself.
    rows.append(f"| XID 79 | {'<br>'.join(messages(agent.until(lambda s: bool(messages(s)))))} |")
    table = "\n".join(["| fault | in the report |", "|---|---|", *rows])
    there = re.search(r"<!-- faults -->\n(.*)\n<!-- end of faults -->", DOCS.read_text(), re.S)
    assert there is not None
    assert there[1] == table, f"the table in {DOCS.name} should be:\n{table}"


def settled(fault: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that checks whether three consecutive samples had an equal, non-empty
    result.
    """
    last: list[list[str]] = []

    def right(status: dict[str, Any]) -> bool:
        last.append(messages(status, fault))
        return len(last) >= 3 and last[-1] == last[-2] == last[-3] != []

    return right
