"""Tests the webhook's port as an API server uses it, with TLS, large bodies, and renewed
certificates.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from headroom.errors import BadSettings
from headroom.runtime.settings.loading import load_settings
from headroom.webhook.endpoints import Webhook, webhook_app
from headroom.webhook.metrics import WebhookTelemetry
from headroom.webhook.review import ContextOf
from tests.admission.reviews import around as nothing_around
from tests.admission.reviews import manifest, patch_of, review
from tests.admission.server import WebhookServer, start_webhook
from tests.certificates import Authority, Certificate
from tests.controlplane import ControlPlane
from tests.monitoring.documented import documented
from tests.monitoring.test_metrics import full_name
from tests.promtool import complaints
from tests.waiting import PATIENCE_S

TEAM = "team-of-the-served-webhook"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("webhook"), "webhook-ca")


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.sign("webhook")


@pytest.fixture(scope="module")
def server(
    plane: ControlPlane, authority: Authority, certificate: Certificate
) -> Iterator[WebhookServer]:
    annotations = {"headroom.gpu/default-vram": "6Gi"}
    namespace = {"metadata": {"name": TEAM, "annotations": annotations}}
    plane.call("POST", "/api/v1/namespaces", namespace)
    with served_with(plane, "served-webhook", authority, certificate) as running:
        yield running


@contextmanager
def served_with(
    plane: ControlPlane, name: str, authority: Authority, certificate: Certificate
) -> Iterator[WebhookServer]:
    running = start_webhook(
        plane, name, authority, plane.kubeconfig(), certificate=certificate, max_body="64Ki"
    )
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def http(server: WebhookServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_a_pod_gets_the_default_of_its_namespace(http: httpx.Client) -> None:
    answer = http.post("/mutate", json=review(manifest(None), namespace=TEAM))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    patch = patch_of(answer.json()["response"])
    assert patch == [
        {
            "op": "add",
            "path": "/metadata/annotations",
            "value": {"headroom.gpu/vram": "6Gi"},
        },
        {
            "op": "add",
            "path": "/metadata/annotations/headroom.gpu~1vram-from",
            "value": f"namespace {TEAM}",
        },
        {"op": "add", "path": "/spec/schedulerName", "value": "headroom"},
    ]


def test_an_invalid_annotation_is_rejected(http: httpx.Client) -> None:
    response = http.post("/validate", json=review(manifest("8GB"))).json()["response"]
    assert response["allowed"] is False
    assert response["status"]["code"] == 422


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/mutate", b"{", 400, "Headroom: the body cannot be read"),
        ("POST", "/validate", b'{"kind": 7}', 400, "Headroom: the body cannot be read"),
        ("POST", "/validate", b" " * 70_000, 413, "Headroom: body is larger than 64Ki"),
        ("GET", "/validate", b"", 405, "Method Not Allowed"),
        ("POST", "/elsewhere", b"{}", 404, "Not Found"),
    ],
)
def test_an_invalid_request_is_rejected_with_a_message(
    http: httpx.Client, method: str, path: str, body: bytes, status: int, message: str
) -> None:
    answer = http.request(method, path, content=body)
    assert answer.status_code == status
    assert message in answer.text


def test_nothing_is_served_without_tls(server: WebhookServer) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(
            server.url.replace("https", "http") + "/mutate", timeout=PATIENCE_S, trust_env=False
        )


def test_a_renewed_certificate_is_used_without_a_restart(
    plane: ControlPlane, authority: Authority, tmp_path: Path
) -> None:
    certificate, new = authority.sign("to-be-renewed"), Authority(tmp_path, "new-ca")
    with (
        served_with(plane, "renewed-webhook", authority, certificate) as server,
        replace(server, authority=new).client() as client,
    ):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.post("/mutate", json=review(manifest()))
        certificate.put(new.sign("renewed"))
        assert client.post("/mutate", json=review(manifest())).status_code == 200


def webhook(
    around: ContextOf = lambda namespace: nothing_around(), unready: Callable[[], str] = str
) -> Webhook:
    telemetry = WebhookTelemetry(CollectorRegistry())
    return Webhook(around, unready, dict, telemetry, 1 << 20)


def test_probes_are_answered_and_the_metrics_match_the_page(
    http: httpx.Client, server: WebhookServer
) -> None:
    assert (http.get("/healthz").text, http.get("/readyz").text) == ("ok\n", "ok\n")
    http.post("/mutate", json=review(manifest(None), namespace=TEAM))
    assert http.get("/metrics").status_code == 404  # on the port of the API server
    with server.prober() as prober:
        text = prober.get("/metrics").text
    assert complaints(text) == []
    named = {full_name(each) for each in text_string_to_metric_families(text)}
    shared = {
        *("headroom_build_info", "headroom_settings_reloads_total"),
        *("headroom_loop_failures_total", "headroom_certificate_end_timestamp_seconds"),
    }
    assert named == documented("The webhook").keys() | shared


def test_a_stuck_webhook_fails_its_probe() -> None:
    served = replace(webhook(), stuck=lambda: {"settings": 31.0})
    answer = asked(webhook_app(served), "/healthz", "GET")
    assert (answer.status_code, answer.text) == (503, "settings (31 s)\n")


def asked(app: FastAPI, path: str, method: str = "POST") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://webhook") as client:
            return await client.request(method, path, json=review(manifest()))

    return asyncio.run(ask())


def test_a_replica_that_has_not_listed_its_objects_does_not_assume_their_absence() -> None:
    why = ["Headroom has not yet listed: namespaces"]
    served = webhook(unready=lambda: "".join(why))
    app = webhook_app(served)
    answer = asked(app, "/mutate")
    assert (answer.status_code, answer.text) == (503, f"Headroom: {why[0]}\n")
    ready = asked(app, "/readyz", "GET")
    assert (ready.status_code, ready.text) == (503, f"{why[0]}\n")
    why.clear()
    assert asked(app, "/mutate").status_code == 200
    ready = asked(app, "/readyz", "GET")
    assert (ready.status_code, ready.text) == (200, "ok\n")
    assert asked(app, "/metrics", "GET").status_code == 404  # on the port of probes
    errors = served.telemetry.registry.get_sample_value(
        "headroom_admission_errors_total", {"path": "mutate"}
    )
    assert errors == 1


def test_an_internal_error_does_not_drop_the_connection() -> None:
    def broken(namespace: str) -> Any:
        raise RuntimeError("broken")

    answer = asked(webhook_app(webhook(broken)), "/validate")
    assert answer.status_code == 500
    assert "internal error" in answer.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"webhook_tls_cert": "a"}, "set both. Example: webhook_tls_cert: tls.crt"),
        ({"resources": ["headroom.gpu/vram"]}, "it would be charged twice"),
        ({"resources": ["nvidia.com/gpu", "head*"]}, "it would be charged twice"),
        ({"scheduler_name": "No Name"}, "scheduler_name"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSettings, match=message):
        load_settings(None, **given)
