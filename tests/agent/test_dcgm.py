"""Tests reading a dcgm-exporter over real HTTP."""

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest

from agent.probes.dcgm import Exporter, Unreadable
from agent.probes.dcgm_exposition import DcgmReading
from agent.probes.readings import DeviceReading
from tests.agent.exporter import Manner, StandIn, recorded
from tests.waiting import until

MOST_BYTES = 16 << 20
STALE_AFTER_S = 120.0

MIB = 1 << 20


class Clock:
    """A clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn().serving() as serving:
        yield serving


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exporter(stand_in: StandIn, clock: Clock) -> Iterator[Exporter]:
    reader = Exporter(stand_in.url, every_s=10, timeout_s=0.5, monotonic=clock)
    yield reader
    reader.close()


def scraped(exporter: Exporter, stand_in: StandIn, clock: Clock) -> tuple[DcgmReading, ...]:
    """Return the readings after another scrape. Retry, because a scrape can end too late on a busy
    machine.
    """
    before, begun_s = exporter.scrapes, time.monotonic()
    clock.now_s += 10

    def ended() -> bool:
        nonlocal begun_s
        if time.monotonic() - begun_s > 1.0:
            begun_s = time.monotonic()
            clock.now_s += 10
        with contextlib.suppress(Unreadable):
            exporter.newest()
        return exporter.scrapes > before

    until(ended, "another scrape")
    return exporter.newest()


def test_an_exposition_that_never_changes_is_not_used(
    exporter: Exporter, stand_in: StandIn, clock: Clock
) -> None:
    stand_in.text = recorded("3.3.5-3.4.0")
    scraped(exporter, stand_in, clock)
    clock.now_s += STALE_AFTER_S
    with pytest.raises(Unreadable, match="its exposition has not changed"):
        scraped(exporter, stand_in, clock)


def test_a_scrape_is_retried_if_its_thread_cannot_start(
    exporter: Exporter, stand_in: StandIn, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.text = recorded("3.3.5-3.4.0")
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    with pytest.raises(Unreadable, match="cannot start a thread"):
        exporter.newest()
    monkeypatch.undo()
    assert scraped(exporter, stand_in, clock)


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_one_missed_scrape_is_tolerated_and_three_are_not(
    exporter: Exporter, stand_in: StandIn, clock: Clock
) -> None:
    stand_in.text = recorded("3.3.5-3.4.0")
    seen = scraped(exporter, stand_in, clock)
    stand_in.status = 503
    clock.now_s += 20
    assert exporter.newest() == seen
    eventually_unreadable(exporter, clock, "answered 503")
    stand_in.status = 200
    assert scraped(exporter, stand_in, clock) == seen


def eventually_unreadable(exporter: Exporter, clock: Clock, why: str) -> None:
    def is_unreadable() -> bool:
        clock.now_s += 10
        try:
            exporter.newest()
        except Unreadable as err:
            return why in str(err)
        return False

    until(is_unreadable, why)


@pytest.mark.parametrize(
    ("manner", "timeout_s", "why"),
    [
        ("silent", 0.1, "no complete answer within 0.1 s"),
        ("drip headers", 0.1, "no complete answer within 0.1 s"),
        ("drip body", 0.1, "no complete answer within 0.1 s"),
        ("endless", 5.0, f"answered more than {MOST_BYTES >> 20} MiB"),
        ("not http", 5.0, "not HTTP: BadStatusLine"),
    ],
)
def test_a_misbehaving_exporter_is_disconnected_and_read_again_when_it_recovers(
    stand_in: StandIn, clock: Clock, manner: Manner, timeout_s: float, why: str
) -> None:
    exporter = Exporter(stand_in.url, every_s=10, timeout_s=timeout_s, monotonic=clock)
    stand_in.manner = manner
    eventually_unreadable(exporter, clock, why)
    stand_in.manner, stand_in.text = "answer", recorded("3.3.5-3.4.0")
    assert scraped(exporter, stand_in, clock)
    exporter.close()


NO_SM = "it does not export DCGM_FI_PROF_SM_ACTIVE or DCGM_FI_PROF_SM_UTIL_RATIO"
BAD_LINES = "some of its lines cannot be read and were ignored"
OTHER_DEVICE = "it exports metrics of devices that are not on this node"


@pytest.mark.parametrize(
    ("text", "state", "message"),
    [
        (recorded("4.6.0-renamed"), "ok", ""),
        (recorded("4.9.0-new-names"), "ok", ""),
        # One of the two devices has no value.
        (recorded("2.1.4-2.3.1-blanks"), "ok", ""),
        (recorded("3.3.5-3.4.0"), "degraded", NO_SM),
        ('DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-c"} 0.5', "degraded", OTHER_DEVICE),
        ("# no metrics\n", "degraded", NO_SM),
        ('DCGM_FI_DEV_XID_ERRORS{UUID="GPU-a', "degraded", f"{BAD_LINES}; {NO_SM}"),
    ],
)
def test_the_state_of_the_source_names_the_missing_data(
    exporter: Exporter, stand_in: StandIn, text: str, state: str, message: str
) -> None:
    stand_in.text = text
    devices = [DeviceReading("nvml", f"GPU-{each}", i) for i, each in enumerate("ab")]
    _, source = exporter.read(devices)
    assert (source.state, source.message) == (state, message)


def test_the_query_of_the_url_is_sent(stand_in: StandIn, clock: Clock) -> None:
    reader = Exporter(f"{stand_in.url}?collect=sm", every_s=10, timeout_s=5, monotonic=clock)
    stand_in.text = recorded("3.3.5-3.4.0")
    assert reader.newest()
    assert stand_in.paths == ["/metrics?collect=sm"]
    reader.close()


def test_a_truncated_response_is_not_used(stand_in: StandIn, clock: Clock) -> None:
    reader = Exporter(stand_in.url, every_s=10, timeout_s=5, monotonic=clock)
    stand_in.manner, stand_in.text = "cut off", recorded("3.3.5-3.4.0")
    eventually_unreadable(reader, clock, "not HTTP: IncompleteRead")
    reader.close()


def test_a_missing_exporter_is_reported(clock: Clock) -> None:
    reader = Exporter("http://127.0.0.1:1/metrics", every_s=10, monotonic=clock)
    with pytest.raises(Unreadable, match="not reached: Connection refused"):
        reader.newest()
    reader.close()
