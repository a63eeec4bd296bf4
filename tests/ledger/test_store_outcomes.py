"""Checks that the error for every API server response to a write states whether the write is
certain.
"""

from collections.abc import Callable
from typing import Any

import pytest

from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import ObjectMeta, Pod
from headroom.errors import (
    OutcomeUnknown,
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
    StoreTimeout,
)
from tests.blocking import Loop
from tests.ledger.client import over
from tests.ledger.store_behaviour import binding
from tests.scripted import Exchange, scripted_server

POD = Pod(metadata=ObjectMeta(name="p", namespace="a", uid="u", resource_version="7"))


def _lost_after_it_was_read(exchange: Exchange) -> None:
    """Read the request, and close the connection without a response."""


def _broken_off(exchange: Exchange) -> None:
    exchange.raw(b'HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\n{"kind": ')


def _nonsense(exchange: Exchange) -> None:
    exchange.reply(200, b"<html>")


def _status(code: int, said: str = "server's words", **headers: str) -> Any:
    def answer(exchange: Exchange) -> None:
        exchange.reply(code, {"reason": "Because", "message": said}, **headers)

    return answer


class TestOutcome:
    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            pytest.param(_lost_after_it_was_read, StoreTimeout, id="lost"),
            pytest.param(_broken_off, StoreTimeout, id="connection closed"),
            pytest.param(Exchange.hang, StoreTimeout, id="hangs"),
            pytest.param(_status(500), OutcomeUnknown, id="500"),
            pytest.param(_status(504), OutcomeUnknown, id="504"),
            pytest.param(_status(429, Retry_After="1"), OutcomeUnknown, id="429"),
            pytest.param(_status(400), StoreRejected, id="400"),
            pytest.param(_status(403), StoreRejected, id="403"),
            pytest.param(_status(422), StoreRejected, id="422"),
            pytest.param(_status(404), StoreNotFound, id="404"),
            pytest.param(_status(409), StoreConflict, id="409"),
            *(
                pytest.param(_status(code, said=said), error, id=f"{code}, {said[:30]}")
                for code, said, error in [
                    (409, "etcdserver: request is too large", StoreRejected),
                    (409, "etcdserver: request timed out", OutcomeUnknown),
                    (409, "context deadline exceeded", OutcomeUnknown),
                    (500, "rpc error: trying to send message larger than max", StoreRejected),
                    (500, "etcdserver: leader changed", OutcomeUnknown),
                    (500, 'failed calling webhook "x.example"', StoreRejected),
                ]
            ),
            pytest.param(_status(401), OutcomeUnknown, id="401"),
            pytest.param(_status(408), OutcomeUnknown, id="408"),
            pytest.param(_status(425), OutcomeUnknown, id="425"),
            pytest.param(_status(405), StoreRejected, id="405"),
            pytest.param(_status(410), OutcomeUnknown, id="410"),
            pytest.param(_status(413), StoreRejected, id="413"),
            pytest.param(_status(307, Location="/elsewhere"), OutcomeUnknown, id="redirected"),
        ],
    )
    @pytest.mark.parametrize("verb", ["bind", "touch_pod", "write_spec"])
    def test_every_write_is_sent_once_and_its_error_states_what_is_certain(
        self, loop: Loop, verb: str, answer: Any, error: type[StoreError]
    ) -> None:
        node = GPUNode(metadata=ObjectMeta(name="n", resource_version="7"))
        timeout_s = 0.1 if answer is Exchange.hang else 30.0
        with (
            scripted_server(answer) as server,
            over(server.configuration(), loop, read_timeout_s=timeout_s) as store,
        ):
            writes: dict[str, Callable[[], object]] = {
                "bind": lambda: store.bind(binding(POD)),
                "touch_pod": lambda: store.touch_pod(POD, "1"),
                "write_spec": lambda: store.write_spec(node, GPUNodeSpec(initialised=True)),
            }
            with pytest.raises(error, match=r"(pod a/p|GPUNode n)") as caught:
                writes[verb]()
            assert type(caught.value) is error
            assert len(server.requests) == 1

    def test_an_error_contains_the_message_of_the_server(self, loop: Loop) -> None:
        with (
            scripted_server(_status(500)) as server,
            over(server.configuration(), loop) as store,
            pytest.raises(OutcomeUnknown) as caught,
        ):
            store.bind(binding(POD))
        assert str(caught.value) == (
            "bind pod a/p to node node-a: POST /api/v1/namespaces/a/pods/p/binding: "
            "500 Because: server's words"
        )

    def test_a_failed_connection_has_an_unknown_result(self, loop: Loop) -> None:
        with scripted_server() as server:
            configuration = server.configuration()
        with (
            over(configuration, loop) as store,
            pytest.raises(StoreTimeout, match="bind pod a/p"),
        ):
            store.bind(binding(POD))

    def test_an_invalid_response_has_an_unknown_result(self, loop: Loop) -> None:
        with (
            scripted_server(_nonsense, _nonsense, _nonsense) as server,
            over(server.configuration(), loop) as store,
        ):
            with pytest.raises(OutcomeUnknown, match="pod a/p: the answer cannot be read") as err:
                store.read_pod("a", "p")
            assert not isinstance(err.value, StoreTimeout)  # It may still read another pod.
            with pytest.raises(OutcomeUnknown, match="read GPUNode n: the answer cannot be read"):
                store.read_gpunode("n")
            with pytest.raises(OutcomeUnknown, match="list pods"):
                store.list_pods()

    def test_reservations_are_read_despite_an_invalid_status(self, loop: Loop) -> None:
        garbled = {
            "metadata": {"name": "n", "resourceVersion": "7"},
            "spec": {"initialised": True},
            "status": {"devices": "none"},
        }
        with (
            scripted_server(lambda exchange: exchange.reply(200, garbled)) as server,
            over(server.configuration(), loop) as store,
        ):
            node = store.read_gpunode("n")
        assert node is not None
        assert node.spec == GPUNodeSpec(initialised=True)
        assert node.status is None

    def test_a_list_with_an_expired_token_restarts_in_one_page(self, loop: Loop) -> None:
        def page(uid: str, token: str) -> Any:
            body = {
                "metadata": {"resourceVersion": "9", "continue": token},
                "items": [{"metadata": {"uid": uid}}],
            }
            return lambda exchange: exchange.reply(200, body)

        with (
            scripted_server(page("old", "token"), _status(410), page("new", "")) as server,
            over(server.configuration(), loop, page_size=1) as store,
        ):
            pods = store.list_pods()
        assert [pod.metadata.uid for pod in pods] == ["new"]
        assert [request.query for request in server.requests] == [
            {"limit": "1"},
            {"limit": "1", "continue": "token"},
            {},
        ]
