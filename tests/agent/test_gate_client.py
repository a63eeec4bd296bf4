"""Tests the process in the gate container, which exits successfully only after the agent allows the
pod to start.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from agent.gate_client import BadEnvironment, Question, read_question, wait
from tests.answering import Answer, Request, answering
from tests.controlplane import ROOT
from tests.processes import free_ports
from tests.waiting import PATIENCE_S

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 3.0

UID = "00000001-1111-4222-8333-000000000001"


@dataclass
class Answers:
    """Returns responses in order, and repeats the last response."""

    told: tuple[tuple[int, object], ...]
    paths: list[str] = field(default_factory=list)

    def __call__(self, request: Request) -> Answer:
        status, body = self.told[min(len(self.paths), len(self.told) - 1)]
        self.paths.append(request.path)
        return status, body


@contextmanager
def served(*told: tuple[int, object]) -> Iterator[tuple[Answers, Question]]:
    answers = Answers(told)
    with answering(answers) as url:
        yield answers, Question(UID, "127.0.0.1", int(url.rpartition(":")[2]))


YES = 200, {"answer": "yes", "reason": ""}
NOT_YET = 503, {"answer": "not yet", "reason": "the report is not written"}
NO = 409, {"answer": "no", "reason": "the device is full"}


def waited(question: Question) -> tuple[list[str], list[float]]:
    """Return the printed lines and the seconds of each sleep."""
    said: list[str] = []
    slept_s: list[float] = []
    wait(question, said.append, slept_s.append, lambda: 7.0, lambda: 0.5)
    return said, slept_s


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(NOT_YET, id="not yet"),
        pytest.param(NO, id="no"),
        pytest.param((400, {"error": "pod_uid is no uid"}), id="a rejected request"),
        pytest.param((200, b"yes"), id="another server than an agent"),
        pytest.param((200, {"answer": "no"}), id="a status that contradicts its body"),
        pytest.param((503, {"answer": "yes"}), id="a body that contradicts its status"),
        pytest.param((200, b'["yes"]'), id="a list"),
        pytest.param((404, b""), id="an agent of another version"),
        pytest.param((200, b"\xff\xfe"), id="not text"),
    ],
)
def test_the_gate_waits_until_the_answer_is_yes(told: tuple[int, object]) -> None:
    with served(told, told, told, YES) as (answers, question):
        said, slept_s = waited(question)
        assert answers.paths == [f"/v1/gate?pod_uid={UID}"] * 4
    assert len(slept_s) == 3
    assert len(said) == 2  # A line that equals the previous line is not printed.
    assert said[-1].startswith("yes")


def test_the_gate_prints_why_it_waits_and_backs_off() -> None:
    with served(*[NOT_YET] * 6, NO, NO, YES) as (_, question):
        said, slept_s = waited(question)
    assert said == [
        "waiting: the report is not written",
        "no: the device is full; waiting for free memory, or for eviction of this pod",
        "yes: every GPU of this pod has enough free memory (asked for 0.0 s)",
    ]
    assert slept_s == [
        FIRST_WAIT_S,
        0.5,
        1.0,
        2.0,
        LONGEST_WAIT_S,
        LONGEST_WAIT_S,
        FIRST_WAIT_S,
        0.5,
    ]


def test_the_gate_reports_that_no_agent_answers() -> None:
    (port,) = free_ports(1)
    said: list[str] = []

    class EnoughWaited(Exception):
        pass

    def stop(_: float) -> None:
        raise EnoughWaited

    with pytest.raises(EnoughWaited):
        wait(Question(UID, "127.0.0.1", port), said.append, stop)
    (line,) = said
    assert line.startswith(f"waiting: no agent answers at http://127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({}, "POD_UID"),
        ({"POD_UID": UID}, "HOST_IP"),
        (
            {"POD_UID": UID, "HOST_IP": "10.0.0.1", "HEADROOM_AGENT_PORT_NUMBER": "x"},
            "HEADROOM_AGENT_PORT_NUMBER",
        ),
    ],
)
def test_missing_variables_are_reported_with_an_example(env: dict[str, str], named: str) -> None:
    with pytest.raises(BadEnvironment, match=f"^{named} .*(write|Example):"):
        read_question(env)


def test_the_gate_calls_the_agent_port_of_its_own_node() -> None:
    env = {"POD_UID": UID, "HOST_IP": "fd00::7"}
    assert read_question(env).url == "http://[fd00::7]:9410"


@pytest.mark.parametrize("service", ["HEADROOM_AGENT", "HEADROOM_AGENT_PORT", "HOST_IP", "POD_UID"])
def test_services_of_the_namespace_do_not_change_the_request(service: str) -> None:
    """The kubelet adds variables for each Service in the pod's namespace to all containers."""
    env = {"POD_UID": UID, "HOST_IP": "10.0.0.1"}
    of_service = {
        f"{service}_SERVICE_HOST": "10.9.9.9",
        f"{service}_SERVICE_PORT": "80",
        f"{service}_SERVICE_PORT_NUMBER": "80",
        f"{service}_PORT": "tcp://10.9.9.9:80",
        f"{service}_PORT_80_TCP": "tcp://10.9.9.9:80",
        f"{service}_PORT_80_TCP_PROTO": "tcp",
        f"{service}_PORT_80_TCP_PORT": "80",
        f"{service}_PORT_80_TCP_ADDR": "10.9.9.9",
    }
    assert read_question(env | of_service) == read_question(env)


def process(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headroom", "gate"],
        # The gate must not use a proxy for the node.
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "http_proxy": "http://[::1]:1"}
        | env,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_gate_exits_successfully_only_after_a_yes() -> None:
    with served(NOT_YET, YES) as (_, question):
        env = {"HOST_IP": question.host, "HEADROOM_AGENT_PORT_NUMBER": str(question.port)}
        with process(POD_UID=UID, **env) as gate:
            said, _ = gate.communicate(timeout=PATIENCE_S)
        assert gate.returncode == 0
        assert [line.split(":")[1].strip() for line in said.splitlines()] == ["waiting", "yes"]
    with process(**env) as gate:
        said, _ = gate.communicate(timeout=PATIENCE_S)
    assert gate.returncode == 2
    assert "fieldPath: metadata.uid" in said


def test_a_waiting_gate_ends_at_once_on_sigterm() -> None:
    with served(NO) as (_, question):
        env = {"HOST_IP": question.host, "HEADROOM_AGENT_PORT_NUMBER": str(question.port)}
        with process(POD_UID=UID, **env) as gate:
            assert gate.stdout is not None
            assert gate.stdout.readline().startswith("headroom gate: no: ")
            gate.send_signal(signal.SIGTERM)
            assert gate.wait(timeout=PATIENCE_S) == 143


def test_the_gate_needs_only_the_standard_library() -> None:
    told = "import sys, agent.gate_client; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", told],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {"agent", "__main__", "sitecustomize", "usercustomize"}
    assert set(done.stdout.split()) - sys.stdlib_module_names - ours == set()
