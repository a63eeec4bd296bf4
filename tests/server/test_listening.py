"""Tests the ports of all programs in networks with IPv4, with IPv6 and with both."""

import json
import socket
import subprocess
import sys

import pytest

from headroom.runtime.settings.loading import load_settings
from headroom.system.listening import host_port, listening_socket
from tests.controlplane import ROOT
from tests.waiting import PATIENCE_S

_V4, _V6 = "10.9.8.7", "fd00:9:8::7"

#: A program that starts the agent's server and the ports of the extender, console and webhook with
#: the shipped settings, and sends a request to each port at each address.
_IN_A_NETWORK = """
import asyncio, http.client, json, sys, threading
from pathlib import Path
from agent import gate_client
from agent.gate_decision import Verdict
from agent.http_endpoints import LatestSample, Server
from agent.settings import read_settings
from headroom.contract.gpunode import GPUNodeStatus
from headroom.runtime.settings.loading import load_settings
from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.ports import Port, serve_ports
from tests.debian import ip
from tests.install.network import run
from tests.waiting import PATIENCE_S

*addresses, listen = sys.argv[1:]
run(*ip(), "link", "set", "lo", "up")
for address in addresses:
    run(*ip(), "address", "add", address, "dev", "lo", *(["nodad"] if ":" in address else []))
if not any(":" in each for each in addresses):
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
board = LatestSample("n1", lambda: 0.0, 1.0)
board.set(GPUNodeStatus(observed_at="then"))
found = {}


def get(name, address, port):
    client = http.client.HTTPConnection(address, port, timeout=PATIENCE_S)
    try:
        client.request("GET", "/healthz")
        found[f"{name} {address}"] = client.getresponse().status
    except OSError as err:
        found[f"{name} {address}"] = type(err).__name__
    client.close()


settings = read_settings(["--node", "n", *(["--listen", listen] if listen else [])], {})
asked = lambda uid: Verdict("yes")
server = Server(board, settings.host, 0, 0, asked, {})
server.start()
for address in addresses:
    get("agent", address, server.port)
    question = gate_client.read_question(
        {"POD_UID": "u", "HOST_IP": address, "HEADROOM_AGENT_PORT_NUMBER": str(server.port)}
    )
    found[f"gate {address}"] = gate_client.ask(question).yes
server.stop()


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def serve():
    shipped = load_settings(Path("deploy/base/headroom.yaml"))
    verbs = listen.removesuffix(":0") or shipped.host
    hosts = {"verbs": verbs, "debug": shipped.debug_at, "webhook": shipped.host}
    ports = [Port(name, host, 0, app, LimitedProtocol) for name, host in hosts.items()]
    serving = asyncio.get_running_loop().create_future()
    announce = lambda line: serving.set_result(json.loads(line))
    running = asyncio.create_task(serve_ports(ports, announce))
    await asyncio.wait([serving, running], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        await running
    for name in hosts:
        port = int(serving.result()[name].rpartition(":")[2])
        for address in addresses:
            await asyncio.to_thread(get, name, address, port)
    running.cancel()


asyncio.run(serve())
print(json.dumps(found))
"""

_PROGRAMS = {"agent": 200, "gate": True, "verbs": 200, "debug": 200, "webhook": 200}


@pytest.mark.parametrize(
    "addresses", [[_V4], [_V6], [_V4, _V6]], ids=["IPv4, no IPv6", "IPv6", "both"]
)
def test_every_port_is_reachable_at_every_address(addresses: list[str]) -> None:
    assert _reached(addresses, "") == {
        f"{name} {address}": answer for name, answer in _PROGRAMS.items() for address in addresses
    }


def test_an_address_in_brackets_is_the_only_one() -> None:
    found = _reached([_V4, _V6], f"[{_V6}]:0")
    assert [found[f"{name} {_V6}"] for name in ("agent", "gate", "verbs")] == [200, True, 200]
    refused = [found[f"{name} {_V4}"] for name in ("agent", "verbs")]
    assert refused == ["ConnectionRefusedError"] * 2


def _reached(addresses: list[str], listen: str) -> dict[str, object]:
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", _IN_A_NETWORK, *addresses, listen],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_missing_address_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        listening_socket("fd00::99", 0, 1)


def test_the_settings_accept_brackets() -> None:
    assert load_settings(None, host="[::1]", debug_open=True).debug_at == "::1"


def test_an_address_in_a_url_has_brackets_if_it_needs_them() -> None:
    assert [host_port("::1", 80), host_port("10.9.8.7", 80)] == ["[::1]:80", "10.9.8.7:80"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "localhost"])
def test_a_small_response_does_not_wait_for_an_acknowledgement(host: str) -> None:
    """A response is sent in two parts, and a client delays its acknowledgement by 40 ms."""
    with listening_socket(host, 0, 1) as listening:
        with socket.create_connection(("localhost", listening.getsockname()[1])):
            connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
