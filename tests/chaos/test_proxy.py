"""Checks how each fault of a connection affects requests."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import urllib3

from tests.answering import Answer, Request, answering
from tests.chaos.faults import KINDS
from tests.chaos.proxy import ToApiServer
from tests.reverse_proxy import Proxies, Wire
from tests.waiting import PATIENCE_S

#: Maps each fault to the number of requests, the statuses that the client gets (None for no
#: response), and whether the server processes all requests.
EFFECTS: dict[str, tuple[int, set[int | None], bool]] = {
    "no fault": (10, {201}, True),
    "slow": (3, {201}, True),
    "stalled": (2, {None}, False),
    "cut off": (2, {None}, False),
    "requests dropped": (40, {201, None}, False),
    "answered 409": (20, {201, 409}, False),
    "answered 429": (20, {201, 429}, False),
    "answered 500": (20, {201, 500}, False),
    "done and answered 409": (20, {201, 409}, True),
    "done and answered 500": (20, {201, 500}, True),
    "done and not answered": (20, {201, None}, True),
    "passed on late": (20, {201, None}, False),
}
OF_PROCESSES = {"killed", "paused", "clock moved", "flooded", "connections cut", "watches cut"}


def test_every_connection_fault_has_a_tested_effect() -> None:
    faults = {what for of in ("extender", "console", "webhook") for what in KINDS[of]}
    assert faults - OF_PROCESSES == EFFECTS.keys() - {"no fault", "stalled"}


@pytest.mark.parametrize("fault", EFFECTS)
def test_a_connection_fault_changes_the_responses(fault: str) -> None:
    count, statuses, all_served = EFFECTS[fault]
    # Run the clients concurrently, so that the test waits only once for their timeouts.
    gives_up = fault in ("stalled", "passed on late")
    timeout_s, clients = (5.0, count) if gives_up else (PATIENCE_S, 1)
    random.seed(1)  # The fault affects the same requests in each run.
    served: list[str] = []

    def answer(request: Request) -> Answer:
        served.append(request.path)
        return 201, b""

    with answering(answer) as url:
        wire, proxies = Wire(), Proxies()
        wire.faults = {fault: 0.4 if fault == "slow" else 1.0}
        proxy = f"http://127.0.0.1:{proxies.serve(ToApiServer({url: wire}))}"
        began_s = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            seen = set(pool.map(lambda _: _status(proxy, timeout_s), range(count)))
        proxies.stop()
    assert seen == statuses
    assert (len(served) == count) == all_served
    assert time.monotonic() - began_s > (count * 0.1 if fault == "slow" else 0.0)


def _status(url: str, timeout_s: float) -> int | None:
    try:
        return urllib3.request("POST", url, retries=False, timeout=timeout_s).status
    except urllib3.exceptions.HTTPError:
        return None
