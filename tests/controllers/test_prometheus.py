"""Tests queries to Prometheus, with faults of the server, cached values, and secrets that must not
be logged.

The server is simulated and misbehaves over real HTTP. ``tests/history`` queries a real Prometheus.
"""

import gzip
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from structlog.testing import capture_logs

from headroom.contract.dcgm import Key
from headroom.core.placement.device_reading import Activity
from headroom.runtime import prometheus as shared
from headroom.runtime.follow import sm_history
from headroom.runtime.follow.sm_history import PrometheusHistory
from headroom.runtime.follow.sm_source import QuerySource, Span
from headroom.runtime.promql import EVERY_CLUSTER
from tests.agent.exporter import Manner, StandIn
from tests.answering import Answer, Request, answering
from tests.certificates import Authority
from tests.controllers.test_promql import AT_S, SPAN, body, ratio, sampled
from tests.processes import free_ports
from tests.waiting import PATIENCE_S, until

SECRET = "s3cret-t0ken"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn().serving() as running:
        running.text = answer(G=0.5)
        yield running


def answer(age_s: float = 1.0, **ratios: object) -> str:
    series = [
        each
        for uuid, figure in ratios.items()
        for each in (ratio(figure, UUID=uuid), sampled(age_s, UUID=uuid))
    ]
    return body(*series).decode()


class Source:
    """A source whose clocks the test sets. It records the results."""

    def __init__(self, url: str, **other: Any) -> None:
        given = {"every_s": 30.0, "timeout_s": 20.0, "stale_after_s": 180.0, **other}
        self.asked = QuerySource(url, SPAN, **given)
        self.now_s, self.wall_s = 1000.0, AT_S
        self.history: Mapping[Key, Activity] = {}
        self.moved: list[list[str]] = []
        self.told: list[tuple[bool, int]] = []
        self.source = PrometheusHistory(
            self.asked,
            self._take,
            lambda answered, devices: self.told.append((answered, devices)),
            lambda: self.now_s,
            lambda: self.wall_s,
        )

    def _take(self, history: Mapping[Key, Activity], moved: Collection[Key]) -> None:
        self.history = history
        self.moved.append(sorted(uuid for uuid, _ in moved))

    def refresh(self, after_s: float = 0.0) -> dict[str, float]:
        """Run a query ``after_s`` seconds later. Return the values by GPU."""
        self.now_s += after_s
        self.wall_s += after_s
        self.source.refresh()
        return {uuid: activity.ratio for (uuid, _), activity in self.history.items()}


def at(server: StandIn) -> str:
    return server.url.removesuffix("/metrics")


def why(source: Source) -> tuple[str, dict[str, float]]:
    """Run a query that fails. Return its log, and the values after the failure."""
    with capture_logs() as logs:
        left = source.refresh()
    (event,) = [each for each in logs if each["event"] == "history_unavailable"]
    return event["message"], left


def test_results_are_queried_and_changes_are_passed_on(server: StandIn) -> None:
    source = Source(at(server) + "/prefix/", timeout_s=7.5)
    assert source.refresh() == {"G": 0.5}
    asked = [urlsplit(path) for path in server.paths]
    assert {each.path for each in asked} == {"/prefix/api/v1/query"}
    assert [parse_qs(each.query) for each in asked] == [
        {"query": [question], "timeout": ["7.5s"]}
        for question in EVERY_CLUSTER.sm_activity(SPAN.quantile, SPAN.window_s)
    ]
    server.text = answer(G=0.51, H=0.2)
    assert source.refresh() == {"G": 0.5, "H": 0.2}
    server.text = answer(H=0.9)
    assert source.refresh() == {"H": 0.9}
    assert source.moved == [["G"], ["H"], ["G", "H"]]
    assert source.told == [(True, 1), (True, 2), (True, 1)]


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        pytest.param(500, "", "it answers 500", id="500"),
        pytest.param(401, "Unauthorized", "it answers 401", id="401"),
        pytest.param(
            503,
            '{"status":"error","errorType":"timeout","error":"query timed out"}',
            "it answers 503: timeout: query timed out",
            id="an error with a reason",
        ),
        pytest.param(
            200,
            '{"status":"error","errorType":"x","error":"y"}',
            "it answers with an error: x: y",
            id="an error with status 200",
        ),
        pytest.param(200, "{", "its answer is not in the format of Prometheus", id="malformed"),
        pytest.param(204, "", "it answers 204", id="no content"),
    ],
)
def test_an_error_keeps_fresh_values_and_is_logged_once(
    server: StandIn, status: int, text: str, says: str
) -> None:
    source = Source(at(server))
    source.refresh()
    server.status, server.text = status, text
    assert why(source) == (says, {"G": 0.5})
    with capture_logs() as logs:
        assert source.refresh(after_s=170) == {"G": 0.5}
        assert source.refresh(after_s=10) == {}
        server.status, server.text = 200, answer(G=0.7)
        source.wall_s = AT_S
        assert source.refresh() == {"G": 0.7}
    assert [each["event"] for each in logs] == ["history_available"]
    assert source.moved == [["G"], [], [], ["G"], ["G"]]
    assert source.told == [(True, 1), (False, 1), (False, 1), (False, 0), (True, 1)]


@pytest.mark.parametrize(
    ("manner", "timeout_s", "says"),
    [
        ("silent", 1.0, "no complete answer within 1 s"),
        ("drip headers", 1.0, "no complete answer within 1 s"),
        ("drip body", 1.0, "no complete answer within 1 s"),
        ("not http", 20.0, "cannot be asked: BadStatusLine: SSH-2.0-OpenSSH_9.2"),
    ],
)
def test_a_slow_server_times_out(
    server: StandIn, manner: Manner, timeout_s: float, says: str
) -> None:
    source = Source(at(server), timeout_s=timeout_s)
    # On a busy machine, earlier queries may still run, and then no new query starts.
    until(lambda: source.refresh() == {"G": 0.5} and not source.source._abandoned, "an answer")
    server.manner = manner
    told, left = why(source)
    assert told.strip() == says
    assert left == {"G": 0.5}
    server.manner, server.text = "answer", answer(G=0.9)
    until(lambda: source.refresh() == {"G": 0.9}, "it is asked again")


def test_an_endless_response_is_read_up_to_the_limit(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MAX_BYTES", 2 << 20)
    server.manner = "endless"
    assert why(Source(at(server)))[0] == "its answer is larger than 2 MiB"


def test_hanging_queries_are_limited(server: StandIn) -> None:
    server.manner = "drip headers"
    source = Source(at(server), timeout_s=0.2)
    for _ in range(4):
        source.refresh()
    assert server.asked == 3
    source.now_s += 1
    source.source._error = None
    assert why(source)[0] == "earlier queries still hang"


def test_an_unreachable_server_is_retried() -> None:
    (port,) = free_ports(1)
    source = Source(f"http://127.0.0.1:{port}")
    assert why(source) == ("cannot be asked: ConnectionRefusedError: Connection refused", {})
    assert source.refresh() == {}
    assert source.told == [(False, 0), (False, 0)]


def test_a_partial_answer_is_used_and_logged(server: StandIn) -> None:
    server.text = body(ratio(0.5, UUID="G"), sampled(1, UUID="G"), warnings=["b: down"]).decode()
    source = Source(at(server))
    with capture_logs() as logs:
        assert source.refresh() == {"G": 0.5}
    assert logs[0] == {"event": "history_incomplete", "log_level": "warning", "warnings": "b: down"}


def test_a_server_with_a_wrong_clock_is_ignored(server: StandIn) -> None:
    source = Source(at(server))
    source.wall_s += 3600
    assert why(source) == (
        "its clock differs from ours by more than the maximum age of a sample",
        {},
    )


def test_after_internal_errors_old_values_expire(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(at(server))
    source.refresh()
    monkeypatch.setattr(sm_history, "history", {}.popitem)
    with capture_logs() as logs:
        assert source.refresh(after_s=10) == {"G": 0.5}
        assert source.refresh(after_s=180) == {}
    assert [each["event"] for each in logs] == [
        "history_failed", "history_unavailable", "history_failed"]  # fmt: skip


class TestSecrets:
    """Tests that secrets are sent to the server but never logged."""

    def test_user_and_password_of_the_url_are_sent_and_not_logged(self, server: StandIn) -> None:
        url = at(server).replace("://", "://us%40er:s3cret-t0ken@")
        Source(url).refresh()
        # "us@er:s3cret-t0ken" in base64.
        assert server.heard["Authorization"] == "Basic dXNAZXI6czNjcmV0LXQwa2Vu"
        (port,) = free_ports(1)
        rejected, nobody = f"http://u:{SECRET}@127.0.0.1:{port}", f"http://u:{SECRET}@"
        for other in (url, rejected, nobody, f"{nobody}ho[st]", f"{nobody}ho st"):
            server.status, server.text = 401, f"u:{SECRET}"
            with capture_logs() as logs:
                Source(other).refresh()
            assert logs
            assert SECRET not in str(logs)

    def test_the_token_file_is_read_for_each_query(self, server: StandIn, tmp_path: Path) -> None:
        file = tmp_path / "token"
        source = Source(at(server), token_file=file)
        for token in (SECRET, "another"):
            file.write_text(f"{token}\n")
            source.refresh()
            assert server.heard["Authorization"] == f"Bearer {token}"

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            pytest.param(None, "cannot be read", id="missing"),
            pytest.param(b"", "holds no token", id="empty"),
            pytest.param(f"{SECRET}\nX".encode(), "holds no token", id="two lines"),
            pytest.param(f"Bearer {SECRET}".encode(), "holds no token", id="a header"),
            pytest.param(SECRET.encode() + b"\xff", "cannot be read", id="bytes"),
        ],
    )
    def test_a_file_without_a_token_is_an_error(
        self, server: StandIn, tmp_path: Path, text: bytes | None, says: str
    ) -> None:
        file = tmp_path / "token"
        if text is not None:
            file.write_bytes(text)
        told, _ = why(Source(at(server), token_file=file))
        assert told == f"prometheus_token_file: {file}: {says}"
        assert server.asked == 0

    def test_netrc_does_not_override_the_token(
        self, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
        monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
        file = tmp_path / "token"
        file.write_text(SECRET)
        Source(at(server), token_file=file).refresh()
        assert server.heard["Authorization"] == f"Bearer {SECRET}"

    def test_a_certificate_of_another_ca_is_not_trusted(self, tmp_path: Path) -> None:
        ours, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
        heard: list[str] = []

        def compressed(request: Request) -> Answer:
            heard.append(request.headers.get("Authorization", ""))
            return 200, gzip.compress(answer(G=0.5).encode()), {"Content-Encoding": "gzip"}

        file = tmp_path / "token"
        file.write_text(SECRET)
        with answering(compressed, ours.sign("server")) as url:
            for ca in (None, other.cert):
                told, _ = why(Source(url, token_file=file, ca=ca))
                assert "CERTIFICATE_VERIFY_FAILED" in told
            assert heard == []
            assert Source(url, token_file=file, ca=ours.cert).refresh() == {"G": 0.5}
            assert set(heard) == {f"Bearer {SECRET}"}


def test_the_thread_queries_periodically_and_stops_immediately(server: StandIn) -> None:
    source = Source(at(server), every_s=0.05, timeout_s=3 * PATIENCE_S)
    source.source.start()
    until(lambda: server.asked >= 3, "three queries")
    server.manner = "silent"
    asked = server.asked
    until(lambda: server.asked > asked, "a query that hangs")
    begun_s = time.monotonic()
    source.source.stop()
    assert time.monotonic() - begun_s < PATIENCE_S  # The query did not wait for a response.
    handed_on = len(source.moved)
    time.sleep(0.1)
    assert len(source.moved) == handed_on


def test_an_error_of_the_receiver_does_not_end_the_thread(server: StandIn) -> None:
    calls: list[int] = []

    def take(*_: object) -> None:
        calls.append(1)
        raise KeyError("ours")

    asked = replace(Source(at(server)).asked, every_s=0.01, span=Span(0.95, 900))
    source = PrometheusHistory(asked, take, wall_s=lambda: AT_S)
    with capture_logs() as logs:
        source.start()
        until(lambda: len(calls) > 2, "it goes on")
        source.stop()
    assert "history_failed" in {each["event"] for each in logs}
