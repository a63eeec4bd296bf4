"""Checks that a console follows the journals of all extenders, and that its views cover all
extenders.
"""

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headroom.console.feed.journal_follower import JournalFollower, addresses
from headroom.core.journal.decision_records import DEFAULT_BOUNDS, Filtered
from headroom.runtime.follow.journal_stream import DecisionLine, StateLine, encode
from tests.answering import Request, answering
from tests.certificates import Authority, Certificate
from tests.serving import Server, binding, offer, pod, serving
from tests.waiting import PATIENCE_S, until

FLEET = """
nodes:
  - {name: a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: b, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
"""


@dataclass
class Extender:
    """Answers each request for its journal with ``lines``, and then keeps the stream open."""

    lines: bytes
    status: int
    seen: list[tuple[str, str | None]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, request: Request) -> None:
        self.seen.append((request.path, request.headers["Authorization"]))
        request.write(b"HTTP/1.1 %d Answered\r\n\r\n%b" % (self.status, self.lines))
        self.let_go.wait(PATIENCE_S)


FILTERED = Filtered(0.0, 1, 7, 5, 2, {1: 3}, ())


def state(replica: str = "other") -> bytes:
    return encode(StateLine(replica, "1.2.3", 0.0, 7, "", "enforce"))


@contextlib.contextmanager
def extender(
    lines: bytes = state(), status: int = 200, certificate: Certificate | None = None
) -> Iterator[tuple[str, Extender]]:
    """Yield the address of a simulated extender, and the extender."""
    simulated = Extender(lines, status)
    with answering(simulated, certificate) as url:
        try:
            yield urlsplit(url).netloc, simulated
        finally:
            simulated.let_go.set()


@contextlib.contextmanager
def follows(*places: str, ca: Path | None = None, shown: str = "", **options: Any) -> Iterator[Any]:
    found = JournalFollower(places, 1, "me", DEFAULT_BOUNDS, ca, **options)
    found.authorization = lambda: shown
    found.start()
    try:
        yield found
    finally:
        found.stop()


def troubles(found: JournalFollower) -> dict[str, str]:
    return {each.address: each.problem for each in found.now()}


def received(found: JournalFollower) -> list[str]:
    return [each.state.replica for each in found.now() if each.state and not each.problem]


def nobody_there() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_a_follower_sends_its_own_token_and_reads_the_name_of_the_extender() -> None:
    with extender() as (place, handler), follows(place, shown="Bearer of-this-process") as found:
        until(lambda: received(found) == ["other"], "the state is read")
        assert handler.seen == [("/v1/journal", "Bearer of-this-process")]


def test_over_tls_an_extender_needs_a_certificate_of_the_ca_for_its_name(tmp_path: Path) -> None:
    """A process with another name cannot impersonate an extender, even if it has a certificate from
    this CA.
    """
    authority, another = Authority(tmp_path, "ca"), Authority(tmp_path, "another")
    with extender(certificate=authority.sign("replica")) as (place, handler):  # for 127.0.0.1
        with follows(place, ca=authority.cert) as found:
            until(lambda: received(found) == ["other"], "it is trusted")
        asked = len(handler.seen)
        for named, ca, rejected in (
            (place, another.cert, "unable to get local issuer certificate"),
            (place.replace("127.0.0.1", "localhost"), authority.cert, "Hostname mismatch"),
        ):
            with follows(named, ca=ca) as found:
                until(
                    lambda rejected=rejected: rejected in troubles(found).get(place, ""), rejected
                )
        assert len(handler.seen) == asked, "a server that is not the extender was sent the token"


def test_extenders_that_do_not_answer_are_listed_with_the_cause() -> None:
    gone = nobody_there()
    with (
        extender() as (place, _),
        extender(status=403) as (closed, _),
        extender(b'{"type":"of-a-later-version"}\n') as (later, _),
        follows(gone, place, closed, later, "no.such.name.invalid") as found,
    ):
        until(lambda: received(found) == ["other"], "one is followed all the same")
        until(lambda: "403" in troubles(found).get(closed, ""), "it is not let in")
        until(lambda: "cannot be read" in troubles(found).get(later, ""), "another version")
        reported = troubles(found)
        assert "refused" in reported[gone]
        assert "could not be resolved" in reported["no.such.name.invalid"]


def test_an_extender_that_restarts_at_its_address_keeps_its_decisions_and_is_not_missing() -> None:
    note = encode(DecisionLine("uid-1.1", "d", "p", 0.0, 0.0, "", 1, (1, 0, 0, 0, 0), FILTERED))
    with (
        extender(state("first") + note) as (place, handler),
        follows(place, reconnect_s=0.05) as found,
    ):
        until(lambda: received(found) == ["first"], "the first is followed")
        handler.lines = state("second")
        before, handler.let_go = handler.let_go, threading.Event()
        before.set()
        until(lambda: "second" in received(found), "the second is followed")
        gone = {each.state.replica: each for each in found.now() if each.is_gone}
        assert gone["first"].journal.records.of_id("uid-1.1") is not None
        (second,) = (each for each in found.now() if not each.is_gone)
        assert second.journal.records.of_id("uid-1.1") is None
        asked = [path for path, _ in handler.seen]
        assert "/v1/journal?replica=first&after=1" in asked


def test_known_addresses_are_followed_while_their_name_is_not_resolved() -> None:
    asked = []

    def failing(place: tuple[str, int]) -> list[tuple[str, int]]:
        asked.append(place)
        if len(asked) > 1:
            raise OSError("temporary failure")
        return addresses(place)

    with (
        extender() as (place, _),
        follows(place, resolve=failing, resolve_every_s=0.05) as found,
    ):
        until(
            lambda: received(found) == ["other"] and len(asked) > 3, "it is followed all the same"
        )
        assert len(found.now()) == 1


def test_an_extender_recognises_itself_among_the_others_and_does_not_follow_itself() -> None:
    with extender(state("me")) as (place, handler), follows(place) as found:
        until(lambda: handler.seen and not found.now(), "it is recognised")
        assert len(handler.seen) == 1


@pytest.mark.slow
def test_decisions_of_an_ended_extender_are_kept() -> None:
    with contextlib.ExitStack() as running, contextlib.ExitStack() as first:
        one = first.enter_context(serving(FLEET))
        two = running.enter_context(beside(one))
        one.post("/filter", offer(pod("p", "12Gi"), "a", "b"))
        until(lambda: ids(two) == ["uid-p.1"], "the decision of the other")
        place = f"127.0.0.1:{port(one)}"
        first.close()

        def unanswered() -> list[str]:
            return [each["peer"] for each in two.get("/v1/decisions").json()["unanswered"]]

        until(lambda: unanswered() == [place], "it is named")
        assert ids(two) == ["uid-p.1"]


def port(server: Server) -> int:
    found = urlsplit(server.debug).port
    assert found is not None
    return found


def ids(server: Server) -> list[str]:
    return [each["decision_id"] for each in server.get("/v1/decisions").json()["decisions"]]


@contextlib.contextmanager
def beside(other: Server, *more: str) -> Iterator[Server]:
    """A second replica that follows the first replica."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(json.dumps({"extenders": [f"127.0.0.1:{port(other)}", *more]}))
        config.flush()
        with serving(FLEET, "--config", config.name) as server:
            yield server


@pytest.mark.slow
def test_each_replica_answers_for_both() -> None:
    """Filter and prioritize were called on one replica, and bind on the other replica. Each replica
    records its own sets of nodes.
    """
    shown, gone = pod("p", "12Gi"), nobody_there()
    with serving(FLEET) as one, beside(one, gone) as two:
        one.post("/filter", offer(shown, "a", "b", "unknown"))
        (best,) = one.post("/prioritize", offer(shown, "a", "b")).json()
        two.post("/filter", offer(pod("other", "1Gi"), "a"))
        # In this test the replica reads the pod from its store. In a cluster, its watch delivers
        # the pod.
        two.post("/filter", offer(shown, "a", "b"))
        assert two.post("/bind", binding(shown, best["Host"])).json()["Error"] == ""

        def decision() -> Any:
            return two.get("/v1/decisions/uid-p.1").json()["decision"]

        until(lambda: decision()["prioritize"], "what the other did is known")
        whole = two.get("/v1/decisions/uid-p.1").json()
        reported: dict[str, Any] = whole["decision"]
        assert reported["prioritize"]["winner"] == best["Host"] == reported["bind"]["node"]
        assert reported["bind"]["outcome"] == "bound"
        assert len({reported[verb]["replica"] for verb in ("prioritize", "bind")}) == 2
        assert reported["filter"]["times"] == 2
        assert [each["peer"] for each in whole["unanswered"]] == [gone]
        assert ids(two) == ["uid-p.1", "uid-other.1"]
        assert one.get("/v1/decisions").json()["unanswered"] == []

        explained = two.get("/v1/explain?pod=default/p").json()
        assert explained["last_decision"] == reported
        placement = json.loads(explained["annotations"]["headroom.gpu/placement"])
        assert placement["decision"] == "uid-p.1"
        logged = [json.loads(line) for line in Path(two.log).read_text().splitlines()]
        assert [entry["decision_id"] for entry in logged if entry["event"] == "bind"] == ["uid-p.1"]

        def contact_age_s() -> float:
            (peer,) = two.get("/v1/status").json()["peers"]
            return float(peer["contact_age_s"])

        # The age would grow to 15 s if the other replica sent nothing.
        until(lambda: contact_age_s() < 15.0, "the other has sent something")
