"""Checks that malformed bodies cannot make the server crash, hang, show internals or place a pod
wrongly.
"""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from headroom.contract.reasons import Reason
from tests.processes import starts_processes
from tests.serving import Reply, Server, binding, offer, pod, serving
from tests.waiting import PATIENCE_S, until

FLEET = """
nodes: [{name: gpu-a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}]
"""


@pytest.fixture(scope="module")
@starts_processes
def server() -> Iterator[Server]:
    with serving(FLEET) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_was_promised(server: Server) -> Iterator[None]:
    yield

    def is_free() -> bool:
        (device,) = server.get("/v1/nodes/gpu-a").json()["node"]["devices"]
        held = device["pods_reserved_bytes"], device["pods_unconfirmed_bytes"], device["holders"]
        return held == (0, 0, [])

    until(is_free, "nothing is held once the assumed bind of the last filter call is over")


def nested(depth: int) -> bytes:
    return b'{"Pod":{"metadata":{"name":"p","uid":"u"},"x":' + b"[" * depth + b"]" * depth + b"}}"


NOT_OFFERS = [
    pytest.param(b"", "not JSON", id="nothing"),
    pytest.param(b"<html>", "not JSON", id="not JSON"),
    pytest.param(b'{"Pod":{"metadata":{"name":"p"', "not JSON", id="truncated"),
    pytest.param(b'{"Pod":"\xff\xfe"}', "not JSON|UTF-8|what kube-scheduler", id="not UTF-8"),
    pytest.param(b"null", "Expected `object`", id="null"),
    pytest.param(b"[]", "Expected `object`", id="a list"),
    pytest.param(b"{}", "Pod is missing", id="empty object"),
    pytest.param(b'{"Pod":null,"Nodes":null,"NodeNames":null}', "Pod is missing", id="all nulls"),
    pytest.param(b'{"Pod":7,"NodeNames":[]}', "$.Pod", id="pod is a number"),
    pytest.param(b'{"Pod":{},"NodeNames":[]}', "metadata", id="pod without metadata"),
    pytest.param(b'{"Pod":{"metadata":null},"NodeNames":[]}', "$.Pod.metadata", id="null metadata"),
    pytest.param(b'{"Pod":{"metadata":{}},"NodeNames":[]}', "metadata.name", id="nameless pod"),
    pytest.param(b'{"Pod":{"metadata":{"name":"p"}},"NodeNames":[]}', "metadata.uid", id="no uid"),
    pytest.param(json.dumps(offer(pod("p")) | {"NodeNames": None}).encode(), "neither",
                 id="no nodes"),
    pytest.param(json.dumps(offer(pod("p")) | {"NodeNames": "gpu-a"}).encode(), "NodeNames",
                 id="names are a string"),
    pytest.param(json.dumps(offer(pod("p")) | {"NodeNames": [None]}).encode(), "NodeNames",
                 id="a name is null"),
    pytest.param(json.dumps({"Pod": pod("p"), "Nodes": {"items": [{}]}}).encode(), "metadata",
                 id="node without metadata"),
    pytest.param(nested(200_000), "nested too deeply|not JSON", id="nested deeply"),
    pytest.param(b'{"Pod":"' + b"x" * 20_000_000 + b'"}', "larger than", id="20 MB"),
]  # fmt: skip


def error_of(reply: Reply) -> str:
    """Return the error in a response. It is the field Error of a response with status 200, or the
    text of a response with status 400 if the verb has no such field.
    """
    text = reply.body.decode()
    assert "Traceback" not in text
    assert "%" not in text
    if reply.status in (400, 413):
        return text
    assert reply.status == 200
    return str(json.loads(text)["Error"])


@pytest.mark.parametrize(("body", "says"), NOT_OFFERS)
@pytest.mark.parametrize("verb", ["filter", "prioritize"])
def test_a_body_without_nodes_is_rejected_with_the_reason(
    server: Server, verb: str, body: bytes, says: str
) -> None:
    reply = server.post(f"/{verb}", body)
    too_large = len(body) > 16 << 20
    assert reply.status == (200 if verb == "filter" else 413 if too_large else 400)
    if too_large:  # The error names the limit and its setting.
        assert "body is larger than 16Mi" in error_of(reply)
        assert "max_body" in error_of(reply)
    error = error_of(reply)
    assert any(part in error for part in says.split("|")), error


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"null", "Expected `object`", id="null"),
        pytest.param(b"{}", "PodName is missing", id="empty object"),
        pytest.param({"PodName": 1}, "$.PodName", id="name is a number"),
        pytest.param({**binding(pod("p"), "gpu-a"), "Node": ""}, "Node is missing", id="no node"),
        pytest.param({**binding(pod("p"), "gpu-a"), "PodUID": None}, "PodUID", id="null uid"),
        pytest.param(binding(pod("never-shown"), "gpu-a"), "does not exist", id="unknown pod"),
        pytest.param(b"x" * 20_000_000, "larger than", id="20 MB"),
    ],
)
def test_an_impossible_bind_is_rejected_with_the_reason(
    server: Server, body: object, says: str
) -> None:
    reply = server.post("/bind", body)
    assert reply.status == 200
    assert says in error_of(reply)


def test_bind_to_an_unknown_node_is_rejected_with_the_reason(server: Server) -> None:
    shown = pod("lost", "1Gi")
    server.post("/filter", offer(shown, "gpu-a"))
    assert "node is not known" in error_of(server.post("/bind", binding(shown, "nowhere")))


def test_bind_of_a_replaced_pod_is_rejected_with_the_reason(server: Server) -> None:
    server.post("/filter", offer(pod("again", "1Gi"), "gpu-a"))
    other = binding(pod("again"), "gpu-a") | {"PodUID": "another"}
    assert "was replaced" in error_of(server.post("/bind", other))


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"{}", b'{"Pod":null}', b'{"Pod":{"metadata":{}}}', b"x" * 20_000_000],
    ids=["nothing", "null", "empty object", "null pod", "nameless pod", "20 MB"],
)
def test_preempt_without_nodes_is_rejected(server: Server, body: bytes) -> None:
    reply = server.post("/preempt", body)
    assert reply.status == (413 if len(body) > 16 << 20 else 400)
    assert error_of(reply)


def test_an_unknown_node_is_rejected_with_a_reason(server: Server) -> None:
    answer = server.post("/filter", offer(pod("p", "1Gi"), "nowhere", "gpu-a")).json()
    assert answer["NodeNames"] == ["gpu-a"]
    assert answer["FailedAndUnresolvableNodes"] == {"nowhere": "node is not known to Headroom"}


def test_an_empty_list_of_nodes_has_an_empty_result(server: Server) -> None:
    answer = server.post("/filter", offer(pod("p", "1Gi"))).json()
    assert (answer["NodeNames"], answer["FailedAndUnresolvableNodes"]) == ([], {})
    assert server.post("/prioritize", offer(pod("p", "1Gi"))).json() == []


def test_a_node_that_is_offered_twice_is_returned_once(server: Server) -> None:
    answer = server.post("/filter", offer(pod("p", "90Gi"), "gpu-a", "gpu-a")).json()
    assert answer["NodeNames"] == []
    assert list(answer["FailedAndUnresolvableNodes"]) == ["gpu-a"]


def test_a_pod_that_is_too_large_for_etcd_is_rejected_in_filter(server: Server) -> None:
    big = pod("too-big", "1Gi")
    env = [{"name": f"E{number}", "value": "y" * 230} for number in range(5000)]
    big["spec"]["containers"][0]["env"] = env
    answer = server.post("/filter", offer(big, "gpu-a")).json()
    assert answer["NodeNames"] == []
    (reported,) = answer["FailedAndUnresolvableNodes"].values()
    assert reported == Reason.POD_TOO_LARGE.sentence
    plain = pod("too-big-without-a-gpu", None)
    plain["spec"]["containers"] = [{"name": "main", "env": env}]
    assert server.post("/filter", offer(plain, "gpu-a")).json()["NodeNames"] == ["gpu-a"]


def test_pod_of_nearly_one_megabyte_is_handled(server: Server) -> None:
    big = pod("big", "1Gi")
    big["metadata"]["annotations"]["notes"] = "x" * 200_000
    env = [{"name": f"E{number}", "value": "y" * 120} for number in range(5000)]
    big["spec"]["containers"][0]["env"] = env
    assert server.post("/filter", offer(big, "gpu-a")).json()["NodeNames"] == ["gpu-a"]


@pytest.mark.parametrize(
    "vram", ["", "8 Gi", "0", "-1Gi", "lots", "1e400", "101%", "main=1Gi,main=2Gi", "other=1Gi",
             "9" * 5000, "٨Gi"],
)  # fmt: skip
def test_an_invalid_annotation_is_rejected_on_all_nodes_with_one_sentence(
    server: Server, vram: str
) -> None:
    answer = server.post("/filter", offer(pod("bad", vram), "gpu-a", "nowhere")).json()
    sentence = "annotation headroom.gpu/vram is not valid (example: 8Gi)"
    assert answer["NodeNames"] == []
    assert answer["FailedAndUnresolvableNodes"] == {"gpu-a": sentence, "nowhere": sentence}
    reported = server.get("/v1/explain?pod=default/bad").json()
    assert reported["verdict"] == "unreadable"
    assert reported["message"].startswith("annotation headroom.gpu/vram: ")
    assert ". Example: headroom.gpu/vram: " in reported["message"]
    assert len(reported["message"]) < 400


def test_a_client_that_disconnects_midway_has_no_effect(server: Server) -> None:
    url = urlsplit(server.verbs)
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as raw:
        raw.sendall(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(1 << 16):
            pass  # The server closes its side once it has noticed the disconnect.
    assert server.post("/filter", offer(pod("p", "1Gi"), "gpu-a")).json()["NodeNames"] == ["gpu-a"]
    assert "Traceback" not in server.log.read_text()


def test_other_methods_and_paths_are_rejected(server: Server) -> None:
    assert server.post("/nothing", b"").status == 404
    assert server._send(server.verbs, "GET", "/filter", b"", {}).status == 405
