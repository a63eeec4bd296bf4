"""Tests reading the pods of a node from an API server."""

import pytest

from headroom.console.node_pods import NodePods
from headroom.errors import StoreError
from headroom.runtime.kube.client import KubeApi
from tests.scripted import Answer, scripted_server


def page(*items: object) -> Answer:
    return lambda exchange: exchange.reply(200, {"metadata": {}, "items": [*items]})


def test_undecodable_pods_of_the_node_are_skipped() -> None:
    head = {"metadata": {"name": "head", "namespace": "ray", "uid": "u"}, "spec": {"nodeName": "n"}}
    with scripted_server(page(head, {"metadata": "none"})) as server:
        api = KubeApi(server.configuration())
        try:
            (pod,) = NodePods(api).on("n")
        finally:
            api.close()
        (request,) = server.requests
    assert (pod.metadata.namespace, pod.metadata.name, pod.node) == ("ray", "head", "n")
    assert request.path == "/api/v1/pods"
    assert request.query["fieldSelector"] == "spec.nodeName=n"
    assert request.query["resourceVersion"] == "0"


def test_a_failed_list_of_pods_is_an_error() -> None:
    with scripted_server(lambda exchange: exchange.reply(403, {})) as server:
        api = KubeApi(server.configuration())
        try:
            with pytest.raises(StoreError, match="list pods of node n"):
                NodePods(api).on("n")
        finally:
            api.close()
