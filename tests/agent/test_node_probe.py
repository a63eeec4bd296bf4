"""Tests which data of a node the agent reads from the API server. If a part is forbidden, it is
missing with a reason, and the other parts are still read.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client

from agent.kube_client import of_client
from agent.probes.node_probe import NodeApi, of_k3s
from agent.probes.readings import (
    HoldingReading,
    KubeletVersionReading,
    MirrorReading,
    ObstacleReading,
    PluginReading,
    PoolReading,
    Reading,
    SourceReading,
    TopologyReading,
)
from tests.agent.scripted import ApiServer
from tests.waiting import PATIENCE_S

NODE = "/api/v1/nodes/n1"
CONFIGZ = f"{NODE}/proxy/configz"
POD = "/api/v1/namespaces/kube-system/pods/still-n1"
HASH = "0123456789abcdef0123456789abcdef"
HELD = HoldingReading("checkpoint", HASH, "main", "r", "GPU-a", "kube-system", "still-n1")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer.serving() as state:
        labels = {"nvidia.com/gpu.sharing-strategy": "none"}
        annotations = {"headroom.gpu/reserve": "1Gi"}
        state.node = {
            "metadata": {"name": "n1", "labels": labels, "annotations": annotations},
            "status": {"nodeInfo": {"kubeletVersion": "v1.36.3"}},
        }
        yield state


class Asking:
    """A ``NodeApi`` whose clock the test sets."""

    def __init__(self, url: str) -> None:
        self.now_s = 0.0
        configuration = client.Configuration(host=url)
        configuration.no_proxy = "*"
        self._client = client.ApiClient(configuration)
        self.api = NodeApi(of_client(self._client), "n1", lambda: self.now_s, timeout_s=PATIENCE_S)

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()
        self._client.close()


@pytest.fixture
def asking(server: ApiServer) -> Iterator[Asking]:
    built = Asking(server.url)
    yield built
    built.close()


def sources(readings: list[Reading]) -> dict[str, tuple[str, str]]:
    return {r.source: (r.state, r.message) for r in readings if isinstance(r, SourceReading)}


def test_labels_reserve_and_topology_policy_are_read_once_a_minute(
    server: ApiServer, asking: Asking
) -> None:
    server.objects[CONFIGZ] = {
        "kubeletconfig": {"topologyManagerPolicy": "restricted", "maxPods": 110}
    }
    readings = list(asking.api.read())
    assert sources(readings) == {"labels": ("ok", ""), "configz": ("ok", "")}
    assert [r.policy for r in readings if isinstance(r, TopologyReading)] == ["restricted"]
    assert [r.sharing for r in readings if isinstance(r, PluginReading)] == ["none"]
    assert asking.api.reserve_bytes == 1 << 30
    assert asking.api.kubelet_version == "v1.36.3"
    assert [r.version for r in readings if isinstance(r, KubeletVersionReading)] == ["v1.36.3"]
    for asking.now_s, requests in ((59.0, 2), (60.0, 4)):
        assert list(asking.api.read()) == readings
        assert len(server.requests) == requests


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        pytest.param(None, [], id="none"),
        pytest.param("auto", [PoolReading("labels")], id="auto"),
        pytest.param("96Gi", [PoolReading("labels", 96 << 30)], id="an amount"),
        pytest.param(
            "96",
            [
                PoolReading(
                    "labels",
                    error="annotation headroom.gpu/unified-memory: '96' is less than 1Mi or more"
                    " than any device has. Example: headroom.gpu/unified-memory: 96Gi",
                )
            ],
            id="invalid",
        ),
    ],
)
def test_the_pool_of_unified_memory_is_read_from_the_annotation(
    server: ApiServer, asking: Asking, text: str | None, pool: list[PoolReading]
) -> None:
    if text is not None:
        server.node["metadata"]["annotations"]["headroom.gpu/unified-memory"] = text
    assert [r for r in asking.api.read() if isinstance(r, PoolReading)] == pool


def test_a_node_whose_kubelet_has_just_started_is_read_each_time(
    server: ApiServer, asking: Asking
) -> None:
    """The node is read again because the new kubelet can have another version."""
    list(asking.api.read())
    server.node["status"]["nodeInfo"]["kubeletVersion"] = "v1.37.2"
    list(asking.api.read())
    assert asking.api.kubelet_version == "v1.36.3"
    asking.api._changing = lambda: True
    list(asking.api.read())
    assert asking.api.kubelet_version == "v1.37.2"


@pytest.mark.parametrize(
    ("answer", "policy", "state"),
    [
        pytest.param({"kubeletconfig": {}}, ["none"], "ok", id="the kubelet's default"),
        pytest.param({"kubeletconfig": {"topologyManagerPolicy": 7}}, [], "absent", id="nonsense"),
        pytest.param(
            {"kubeletconfig": {"topologyManagerPolicy": "9" * 1000}}, [], "degraded", id="no policy"
        ),
        pytest.param(["?"], [], "absent", id="another page"),
        pytest.param(None, [], "", id="not permitted"),
    ],
)
def test_an_unreported_policy_is_not_guessed(
    server: ApiServer, asking: Asking, answer: Any, policy: list[str], state: str
) -> None:
    if answer is None:
        server.reject["GET", CONFIGZ] = (403, {})
    server.objects[CONFIGZ] = answer
    readings = list(asking.api.read())
    assert [r.policy for r in readings if isinstance(r, TopologyReading)] == policy
    assert sources(readings).get("configz", ("", ""))[0] == state
    assert sources(readings)["labels"] == ("ok", "")
    assert server.sent().count(("GET", CONFIGZ)) == 1
    # A forbidden request is retried after an hour, and other failed requests after a minute.
    asking.now_s = 3599.0
    list(asking.api.read())
    assert server.sent().count(("GET", CONFIGZ)) == (1 if answer is None else 2)
    asking.now_s = 3660.0
    list(asking.api.read())
    assert server.sent().count(("GET", CONFIGZ)) == (2 if answer is None else 3)


def test_an_unreachable_server_is_waited_for_only_once(server: ApiServer) -> None:
    nobody = Asking("http://127.0.0.1:9")
    try:
        assert sources(list(nobody.api.read())) == {
            "labels": ("absent", "API server cannot be reached")
        }
        assert nobody.api.reserve_bytes is None
    finally:
        nobody.close()


NO_ANSWER = [
    pytest.param(b"<html>", id="not JSON"),
    pytest.param(b'{"metadata": {"uid": "\xff"}}', id="not UTF-8"),
    pytest.param(b'{"kind": ' + 10_000 * b"[" + 10_000 * b"]" + b"}", id="nested too deeply"),
]


@pytest.mark.parametrize("body", NO_ANSWER)
def test_an_invalid_response_counts_as_absent(
    server: ApiServer, asking: Asking, body: bytes
) -> None:
    server.objects[NODE] = body
    why = "API server's answer cannot be read"
    assert sources(list(asking.api.read()))["labels"] == ("absent", why)


@pytest.mark.parametrize("reserve", ["much", "-1Gi"])
def test_an_invalid_reserve_counts_as_unknown(
    server: ApiServer, asking: Asking, reserve: str
) -> None:
    assert server.node is not None
    server.node["metadata"]["annotations"]["headroom.gpu/reserve"] = reserve
    assert sources(list(asking.api.read()))["labels"] == ("ok", "")
    assert asking.api.reserve_bytes is None


def test_an_invalid_device_choice_is_reported_until_it_is_corrected(
    server: ApiServer, asking: Asking
) -> None:
    assert server.node is not None
    annotations = server.node["metadata"]["annotations"]

    def obstacles() -> list[str]:
        asking.now_s += 60.0
        return [r.reason for r in asking.api.read() if isinstance(r, ObstacleReading)]

    annotations["headroom.gpu/device-choice"] = "steerd"
    assert obstacles() == [
        "the node takes no GPU pods: annotation headroom.gpu/device-choice: 'steerd' is not one of "
        "predicted, gated, steered. Example: headroom.gpu/device-choice: predicted"
    ]
    # The previous choice stays in effect, because a typing error must not end steering.
    assert asking.api.device_choice is None
    annotations["headroom.gpu/device-choice"] = "steered"
    assert obstacles() == []
    assert asking.api.device_choice == "steered"


def mirror(uid: str, told_hash: str = HASH) -> dict[str, Any]:
    annotations = {"kubernetes.io/config.hash": told_hash}
    return {"metadata": {"name": "still-n1", "uid": uid, "annotations": annotations}}


def test_the_mirror_of_a_static_pod_is_read_once(server: ApiServer, asking: Asking) -> None:
    server.objects[POD] = mirror("uid-1")
    for _ in range(2):
        assert list(asking.api.follow([HELD])) == [
            MirrorReading("mirrors", HASH, "uid-1", "kube-system", "still-n1"),
            SourceReading("mirrors"),
        ]
    assert server.sent().count(("GET", POD)) == 1
    assert list(asking.api.follow([])) == []  # The pod is deleted, and its mirror pod is forgotten.
    list(asking.api.follow([HELD]))
    assert server.sent().count(("GET", POD)) == 2


@pytest.mark.parametrize(
    ("found", "why"),
    [
        pytest.param(None, "API server answers 403", id="forbidden"),
        pytest.param(
            mirror("uid-1", "f" * 32), "is a different pod", id="another pod of the same name"
        ),
    ],
)
def test_a_missing_mirror_pod_is_reported_and_read_again_after_a_minute(
    server: ApiServer, asking: Asking, found: Any, why: str
) -> None:
    server.objects[POD] = found
    if found is None:
        server.reject["GET", POD] = (403, {})
    list(asking.api.read())
    (shown,) = asking.api.follow([HELD])
    assert isinstance(shown, SourceReading)
    assert shown.state == "degraded"
    assert why in shown.message
    server.reject.clear()
    server.objects[POD] = mirror("uid-1")
    assert list(asking.api.follow([HELD])) == [shown]
    asking.now_s = 60.0
    list(asking.api.read())
    assert list(asking.api.follow([HELD]))[-1] == SourceReading("mirrors")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('["server","--kubelet-arg","topology-manager-policy=restricted"]', ("k3s", "restricted")),
        ('["agent","--kubelet-arg=topology-manager-policy=none"]', ("k3s", "none")),
        ('["server"]', ("k3s-default", "none")),
        ('["server","--kubelet-arg=config=/etc/k.yaml"]', None),
        ('["server","--kubelet-arg","config-dir=/etc/k.d"]', None),
        (
            '["--kubelet-arg=config=/k","--kubelet-arg=topology-manager-policy=none"]',
            ("k3s", "none"),
        ),
        ('["--config","/k3s.yaml","--kube-proxy-arg","config=/p"]', ("k3s-default", "none")),
        ('["--kubelet-arg","topology-manager-policy=new"]', None),
        ("{", None),
        ("", None),
    ],
)
def test_the_topology_policy_is_read_from_the_node_arguments_of_k3s(
    arguments: str, expected: tuple[str, str] | None
) -> None:
    found = of_k3s({"k3s.io/node-args": arguments})
    assert found == (None if expected is None else TopologyReading(*expected))
