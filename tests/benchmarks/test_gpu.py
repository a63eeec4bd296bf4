"""Runs all of ``make gpu`` with stand-ins for the driver library, libcuda, nvidia-smi and MPS."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.checks import CHECKS
from tests.benchmarks.gpu.stage import FIRST, Stage
from tests.driver import GIB
from tests.processes import starts_processes
from tests.waiting import until

#: The deadline only has to be long, because the machine may be busy.
SHORT = ("--seconds", "1", "--looks", "5", "--pause", "0.3", "--deadline", "120")


def has_pid_namespaces() -> bool:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
@starts_processes
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_every_line_is_ok_on_a_machine_that_behaves_as_expected(stage: Stage) -> None:
    found = stage.verdicts(*SHORT)
    assert [*found] == [*CHECKS]
    absent = ("memory-limits", "frameworks")
    expected = dict.fromkeys(CHECKS, "ok") | dict.fromkeys(absent, "not possible here")
    if os.geteuid() != 0:
        expected["capabilities"] = "not possible here"
    if not has_pid_namespaces():
        expected["pid-namespace"] = "not possible here"
    surprises = {name: line for name, line in found.items() if line[0] != expected[name]}
    assert surprises == {}
    assert (
        "allocated 1.0 GiB, 5.0 GiB, 10.0 GiB; listed 1.3 GiB, 5.3 GiB, 10.3 GiB"
        in (found["processes"][1])
    )
    assert "Compute_v3: 3 of 24 bytes" in found["stride"][1]
    assert "MPSCompute: 2 processes, 2 of 2 clients" in found["mps"][1]
    assert "XID 31" in found["illegal-address"][1]
    assert stage.processes() == []
    texts = {path.name: path.read_text() for path in stage.out.iterdir()}
    assert {"README.md", "report.md", "smi.xml", "lists-three-processes.json"} <= texts.keys()
    # The report does not contain data that identifies the machine or its owner.
    for secret in (FIRST, "1654023000", "train.py", str(stage.out.parent)):
        assert [name for name, text in texts.items() if secret in text] == []
    assert "| `nvmlDeviceGetUUID` |" in texts["report.md"]
    assert (
        "`make gpu 'ARGS=--seconds 1 --looks 5 --pause 0.3 --deadline 120'` on 20"
        in texts["report.md"]
    )


HOLDS_MORE = "a process holds more than is used"
#: Maps each simulated fault to the only lines that it changes, and the text in their summaries.
LIES = {
    "nvidia-smi reads more used memory": (
        {"FAKE_SMI_USED_MIB": "100"},
        (),
        {"fields": "used 0.0 MiB, nvidia-smi 100 MiB"},
    ),
    "nvidia-smi reads other minors": (
        {"FAKE_SMI_MINOR": "1"},
        (),
        {"minor": "the minor number is 0 in the agent, 1 in nvidia-smi"},
    ),
    "dmon sees more SM activity": (
        {"FAKE_SMI_SM": "40"},
        (),
        {"sm-activity": "idle: 0% by the agent, 40% by dmon"},
    ),
    "the driver asks to distrust the device for an unknown field": (
        {},
        ("fail nvmlDeviceGetFieldValues 999",),
        {"unknown-fields": "the agent takes code 999 for device fault"},
    ),
    "the driver lists no processes": (
        {},
        tuple(f"fail nvmlDeviceGetComputeRunningProcesses{v} 3" for v in ("_v2", "_v3")),
        {
            "processes": "the driver lists no processes",
            "stride": "the agent does not read the process with 1.0 GiB",
        },
    ),
    HOLDS_MORE: (
        {},
        (f"process compute {os.getpid()} {60 * GIB}",),
        {"unattributed": "pods and unattributed together are "},
    ),
    "MPS clients are in no list": (
        {},
        ("fail nvmlDeviceGetMPSComputeRunningProcesses_v3 3",),
        {"mps": "no list gives the bytes of the client with 1.0 GiB"},
    ),
    "MPS does not limit its clients": (
        {"FAKE_CUDA_UNLIMITED": "1"},
        (),
        {"mps-limit": "2 GiB: 10.0 GiB allocated, limit 2.0 GiB"},
    ),
    "an illegal address takes the GPU off the bus": (
        {"FAKE_CUDA_XID": "79"},
        (),
        {"illegal-address": "the agent marks the device: XID 79 (nvml)"},
    ),
    "both engines get all that they want": (
        {"FAKE_CUDA_ENDLESS": "1"},
        (),
        {"engines": "two engines that start at the same time both get what they want"},
    ),
    "processes on one GPU do not take turns": (
        {"FAKE_CUDA_NO_TURNS": "1"},
        (),
        {
            "contention": "time-slicing, half of the SMs with half of the SMs: half of the SMs "
            "keeps 100% of its speed, expected 50%"
        },
    ),
    "the agent takes more memory": (
        {"FAKE_NVML_BALLAST_MIB": "90"},
        (),
        {"cost": "MiB resident, limit 80"},
    ),
}


#: Faults of each run. They change different lines. A run takes several seconds of CPU.
RUNS = {
    "nvidia-smi, libcuda and the agent": [lie for lie in LIES if not LIES[lie][1]],
    "answers of the driver": [lie for lie in LIES if LIES[lie][1] and lie != HOLDS_MORE],
    HOLDS_MORE: [HOLDS_MORE],
}


@pytest.mark.parametrize("lies", RUNS.values(), ids=RUNS)
def test_simulated_faults_make_their_lines_differ(stage: Stage, lies: list[str]) -> None:
    environment: dict[str, str] = {}
    expected: dict[str, str] = {}
    answers: list[str] = []
    for lie in lies:
        variables, statements, texts = LIES[lie]
        assert not expected.keys() & texts.keys()
        environment |= variables
        expected |= texts
        answers += statements
    stage.driver.say(FIRST, *stage.quiet, *answers)
    found = stage.verdicts(*SHORT, "--only", ",".join(expected), **environment)
    for name, text in expected.items():
        assert found[name][0] == "differs", found
        assert text in found[name][1]


def test_a_machine_without_a_gpu_gets_one_line(stage: Stage) -> None:
    stage.driver.say("", "driver none")
    status, out, err = stage.run()
    assert status == 2
    assert out == ""
    assert err.splitlines() == [
        "make gpu: no GPU to check: Driver Not Loaded (NVML 9)",
    ]


def test_checks_that_would_disturb_other_processes_are_skipped(stage: Stage) -> None:
    stage.driver.use(os.getpid(), {FIRST: 8 * GIB})
    found = stage.verdicts(*SHORT, "--only", "processes,sm-activity,illegal-address,mps,engines")
    assert found.pop("processes")[0] == "ok"
    for verdict, summary in found.values():
        assert verdict == "not possible here"
        assert summary == "the GPU is in use (1 process of others), and this would disturb it"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_check_leaves_no_process(stage: Stage, number: signal.Signals) -> None:
    # A killed check does not delete its folder, so put the folder where pytest deletes it.
    process = stage.start("--only", "cost", TMPDIR=str(stage.out.parent))
    try:
        until(lambda: any("agent --no-publish" in each for each in stage.processes()), "agent")
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    until(lambda: stage.processes() == [], "no process is left")
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert err.splitlines()[-1] == "interrupted: every process that was started is ended"
