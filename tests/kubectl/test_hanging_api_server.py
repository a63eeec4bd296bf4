"""Checks that commands end with an error if an API server accepts connections but does not respond.
The error names the API server.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headroom.kubectl import cluster_changes, transport
from headroom.kubectl.cluster_changes import Cluster
from headroom.kubectl.debug_api_client import UNREACHABLE, CommandError, DebugApi
from headroom.kubectl.transport import Proxied

TIMEOUT_S = 0.2


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, str]]:
    """Yield a listening socket and the path of a kubeconfig with its address."""
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path / "cache"))
    for module in (cluster_changes, transport):
        monkeypatch.setattr(module, "API_TIMEOUT_S", (TIMEOUT_S, TIMEOUT_S))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        cluster = {"server": f"http://127.0.0.1:{server.getsockname()[1]}"}
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(config))
        yield server, str(kubeconfig)


def connections(server: socket.socket) -> int:
    count = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_session_is_requested_once(hanging: tuple[socket.socket, str]) -> None:
    server, kubeconfig = hanging
    api = DebugApi(Proxied(kubeconfig, None, "headroom-system"))
    with pytest.raises(CommandError, match="the API server does not answer: ") as caught:
        api.get("nodes")
    assert (caught.value.exit_code, connections(server)) == (UNREACHABLE, 1)
    assert "Read timed out" in str(caught.value)
    assert "/apis/" not in str(caught.value)


def test_a_node_is_read_once(hanging: tuple[socket.socket, str]) -> None:
    server, kubeconfig = hanging
    cluster = Cluster(kubeconfig, None)
    with pytest.raises(CommandError, match="node a cannot be read: the API server does not answer"):
        cluster.node("a")
    assert connections(server) == 1
