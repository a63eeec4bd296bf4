"""Tests a port that is served by its own thread."""

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.ports import Port, serve_beside
from headroom.system.listening import listening_socket
from headroom.webhook.process import Heartbeat


def port(number: int = 0) -> Port:
    app = FastAPI(openapi_url=None)

    async def answer(_: Request) -> Response:
        return PlainTextResponse("ok")

    app.router.add_route("/healthz", answer, methods=["GET"])
    return Port("probes", "127.0.0.1", number, app, LimitedProtocol)


def test_the_port_answers_while_no_other_event_loop_runs() -> None:
    with serve_beside(port()) as address:
        assert httpx.get(f"{address}/healthz", trust_env=False).text == "ok"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/healthz", trust_env=False)


def test_a_port_in_use_is_reported() -> None:
    with listening_socket("127.0.0.1", 0, backlog=1) as taken:
        number = taken.getsockname()[1]
        with (
            pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{number}"),
            serve_beside(port(number)),
        ):
            pass


def test_a_blocked_event_loop_is_reported() -> None:
    now_s = [100.0]
    beat = Heartbeat(lambda: now_s[0])
    now_s[0] += 30
    assert beat.stuck() == {}
    now_s[0] += 1
    assert beat.stuck() == {"reviews": 31.0}


@pytest.mark.parametrize("probe", ["livenessProbe", "readinessProbe", "startupProbe"])
def test_the_kubelet_probes_this_port(probe: str) -> None:
    manifest = Path(__file__).parents[2] / "deploy/base/webhook-server.yaml"
    _, _, found = manifest.read_text().partition(f"{probe}:\n")
    assert "port: probes-tls, scheme: HTTPS" in found.partition("\n")[0]
