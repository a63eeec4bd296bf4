"""Tests leader election with one Lease, two candidates, their clocks, and failures."""

import json
from typing import Any

import pytest

from headroom.runtime.kube.api_errors import ApiStatus, NoAnswer
from headroom.runtime.kube.election import LEASE_S, Election


class LeaseServer:
    """A fake API server with at most one Lease. Writes of the Lease depend on its version."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.is_down = False

    def call(self, method: str, path: str, body: bytes | None = None, **_: Any) -> bytes:
        if self.is_down:
            raise NoAnswer("down")
        if method == "GET":
            if self.lease is None:
                raise ApiStatus(path, 404, "")
            return json.dumps(self.lease).encode()
        assert body is not None
        sent = json.loads(body)
        current = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if (
            (self.lease is not None)
            if method == "POST"
            else (sent["metadata"].get("resourceVersion") != current)
        ):
            raise ApiStatus(path, 409, "")
        self.version += 1
        sent["metadata"]["resourceVersion"] = str(self.version)
        self.lease = sent
        return body


@pytest.fixture
def server() -> LeaseServer:
    return LeaseServer()


class Clock:
    at_s = 1000.0


def candidate(server: LeaseServer, name: str, clock: Clock) -> Election:
    return Election(
        server,  # type: ignore[arg-type]
        "headroom-system",
        "headroom-recorder",
        name,
        lambda: clock.at_s,
        lambda: 1.8e9 + clock.at_s,
    )


def test_the_first_candidate_leads_and_another_takes_over_when_the_lease_has_expired(
    server: LeaseServer,
) -> None:
    clock = Clock()
    a, b = candidate(server, "a", clock), candidate(server, "b", clock)
    a.attempt()
    b.attempt()
    assert (a.leads, b.leads) == (True, False)
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "a"
    clock.at_s += LEASE_S - 1
    b.attempt()
    assert (a.leads, b.leads) == (True, False)
    clock.at_s += 2
    b.attempt()
    assert (a.leads, b.leads) == (False, True)
    assert server.lease["spec"]["leaseTransitions"] == 2
    a.attempt()
    assert not a.leads


def test_renewing_keeps_the_lease_and_the_time_of_its_acquisition(server: LeaseServer) -> None:
    clock = Clock()
    a, b = candidate(server, "a", clock), candidate(server, "b", clock)
    a.attempt()
    assert server.lease is not None
    acquired = server.lease["spec"]["acquireTime"]
    for _ in range(10):
        clock.at_s += LEASE_S / 2
        a.attempt()
        b.attempt()
        assert (a.leads, b.leads) == (True, False)
    assert server.lease["spec"]["acquireTime"] == acquired
    assert server.lease["spec"]["renewTime"] != acquired


def test_a_leader_without_a_response_stops_before_another_can_begin(server: LeaseServer) -> None:
    clock = Clock()
    a, b = candidate(server, "a", clock), candidate(server, "b", clock)
    a.attempt()
    b.attempt()
    server.is_down = True
    clock.at_s += LEASE_S
    with pytest.raises(NoAnswer):
        a.attempt()
    assert not a.leads
    server.is_down = False
    b.attempt()
    assert not b.leads
    clock.at_s += 1
    b.attempt()
    assert b.leads


def test_one_of_two_concurrent_writers_leads(server: LeaseServer) -> None:
    clock = Clock()
    a, b = candidate(server, "a", clock), candidate(server, "b", clock)
    read = b._read
    b._read = lambda: (read(), a.attempt())[0]  # type: ignore[method-assign]
    b.attempt()
    assert (a.leads, b.leads) == (True, False)


def test_after_a_release_another_candidate_leads_at_once(server: LeaseServer) -> None:
    clock = Clock()
    a, b = candidate(server, "a", clock), candidate(server, "b", clock)
    a.attempt()
    b.attempt()
    a.release()
    b.attempt()
    assert (a.leads, b.leads) == (False, True)
    a.release()  # It is not the leader, so nothing happens.
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "b"
    server.is_down = True
    b.release()
    assert not b.leads
