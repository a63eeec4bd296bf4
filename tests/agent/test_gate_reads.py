"""Checks that the agent reads the reservations once per second for any number of pods, and that
pods do not start if the read fails.
"""

import math
from collections.abc import Callable

import msgspec
import pytest

from agent.gate_service import GateService
from agent.gate_starts import GateStarts
from agent.kube_publisher import NotDelivered
from headroom.contract.errors import BadReport
from headroom.contract.gpunode import (
    GPUNode,
    GPUNodeStatus,
)
from tests.agent.gate_node import READ_EVERY_S, ask, node, reservation, row, status


class Ledger:
    def __init__(self, answer: GPUNode | Exception | None) -> None:
        self.answer = answer
        self.reads = 0

    def gpunode(self) -> GPUNode | None:
        self.reads += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_ledger_is_read_once_a_second_for_any_number_of_requests() -> None:
    sample, at_s = status(row("p", "GPU-a")), [10.0]
    ledger = Ledger(node({"p": reservation(1)}, sample))
    gate_service = GateService(ledger, lambda: sample, lambda: 0, lambda: at_s[0], GateStarts(None))
    assert [gate_service.ask(uid).answer for uid in ("p", "q", "p")] == ["yes", "not yet", "yes"]
    assert ledger.reads == 1
    at_s[0] += READ_EVERY_S
    gate_service.ask("p")
    assert ledger.reads == 2


@pytest.mark.parametrize("answer", [NotDelivered("rejected"), BadReport("no JSON"), None])
def test_no_pod_starts_while_the_ledger_is_unreadable(
    answer: Exception | None,
) -> None:
    sample, at_s = status(row("p", "GPU-a")), [10.0]
    ledger = Ledger(node({"p": reservation(1)}, sample))
    gate_service = GateService(ledger, lambda: sample, lambda: 0, lambda: at_s[0], GateStarts(None))
    assert gate_service.ask("p").answer == "yes"
    ledger.answer = answer
    at_s[0] += READ_EVERY_S
    assert gate_service.ask("p").answer == "not yet"


def unknown() -> None:
    return None


@pytest.mark.parametrize(
    ("fresh", "reserve"),
    [
        pytest.param(unknown, lambda: 0, id="no fresh sample"),
        pytest.param(lambda: status(row("p", "GPU-a")), unknown, id="no annotations"),
    ],
)
def test_no_pod_starts_while_the_gate_service_lacks_data(
    fresh: Callable[[], GPUNodeStatus | None], reserve: Callable[[], int | None]
) -> None:
    ledger = Ledger(node({"p": reservation(1)}, status(row("p", "GPU-a"))))
    assert (
        GateService(ledger, fresh, reserve, lambda: math.inf, GateStarts(None)).ask("p").answer
        == "not yet"
    )


def test_a_verdict_contains_nothing_about_other_pods() -> None:
    reservations = {"p": reservation(60), "secret": reservation(41, name="secret")}
    sample = status(row("p", "GPU-a"), row("secret", "GPU-a", name="secret"))
    message = msgspec.json.encode(ask(reservations, sample)).decode()
    assert "secret" not in message
    assert not any(character.isdigit() for character in message)
