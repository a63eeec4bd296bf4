"""The webhook's port as an API server meets it: TLS, bodies, certificates that are renewed."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from extender.configuration import load_settings
from extender.errors import BadSettings
from extender.telemetry import Telemetry
from extender.web.admission import webhook_app
from tests.admission.reviews import around, manifest, patch_of, review
from tests.certificates import Authority, Certificate
from tests.serving import Server, serving

FLEET = """
nodes: [{name: gpu-a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}]
namespaces: [{name: team-a, defaultVram: 6Gi}]
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("webhook"), "webhook-ca")


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.sign("webhook")


@pytest.fixture(scope="module")
def server(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served_with(certificate, tmp_path_factory.mktemp("settings")) as running:
        yield running


@contextmanager
def served_with(certificate: Certificate, folder: Path) -> Iterator[Server]:
    settings = folder / "headroom.yaml"
    given = {
        "webhook_port": 0,
        "webhook_tls_cert": str(certificate.cert),
        "webhook_tls_key": str(certificate.key),
        "max_body": "64Ki",
    }
    settings.write_text(json.dumps(given))
    with serving(FLEET, "--config", str(settings)) as running:
        yield running


def url(server: Server) -> str:
    assert server.webhook is not None
    return server.webhook


@pytest.fixture(scope="module")
def http(server: Server, authority: Authority) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(authority.cert))
    with httpx.Client(base_url=url(server), verify=context, timeout=30, trust_env=False) as client:
        yield client


def test_a_pod_gets_its_namespace_s_default(http: httpx.Client) -> None:
    answer = http.post("/mutate", json=review(manifest(None)))
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
            "value": "namespace team-a",
        },
        {"op": "add", "path": "/spec/schedulerName", "value": "headroom"},
    ]


def test_a_bad_annotation_is_refused(http: httpx.Client) -> None:
    response = http.post("/validate", json=review(manifest("8GB"))).json()["response"]
    assert response["allowed"] is False
    assert response["status"]["code"] == 422


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/mutate", b"{", 400, "Headroom: the body cannot be read"),
        ("POST", "/validate", b'{"kind": 7}', 400, "Headroom: the body cannot be read"),
        ("POST", "/validate", b" " * 70_000, 413, "Headroom: body is larger than 65536 bytes"),
        ("GET", "/validate", b"", 405, "Method Not Allowed"),
        ("POST", "/elsewhere", b"{}", 404, "Not Found"),
    ],
)
def test_whatever_else_is_said_to_be_wrong(
    http: httpx.Client, method: str, path: str, body: bytes, status: int, said: str
) -> None:
    answer = http.request(method, path, content=body)
    assert answer.status_code == status
    assert said in answer.text


def test_nothing_is_served_without_tls(server: Server) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.post(url(server).replace("https", "http") + "/mutate", timeout=10, trust_env=False)


def test_a_renewed_certificate_is_used_without_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, new = authority.sign("to-be-renewed"), Authority(tmp_path, "new-ca")
    context = ssl.create_default_context(cafile=str(new.cert))
    with (
        served_with(certificate, tmp_path) as server,
        httpx.Client(base_url=url(server), verify=context, timeout=30, trust_env=False) as client,
    ):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.post("/mutate", json=review(manifest()))
        certificate.put(new.sign("renewed"))
        assert client.post("/mutate", json=review(manifest())).status_code == 200


def asked(app: FastAPI, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://webhook") as client:
            return await client.post(path, json=review(manifest()))

    return asyncio.run(ask())


def test_a_replica_that_has_not_listed_does_not_take_absent_for_known() -> None:
    why = ["Headroom has not yet listed: namespaces"]
    telemetry = Telemetry(CollectorRegistry())
    app = webhook_app(lambda namespace: around(), lambda: "".join(why), telemetry, 1 << 20)
    answer = asked(app, "/mutate")
    assert (answer.status_code, answer.text) == (503, f"Headroom: {why[0]}\n")
    why.clear()
    assert asked(app, "/mutate").status_code == 200
    errors = telemetry.registry.get_sample_value(
        "headroom_admission_errors_total", {"path": "mutate"}
    )
    assert errors == 1


def test_a_fault_of_ours_is_no_dropped_connection() -> None:
    def broken(namespace: str) -> Any:
        raise RuntimeError("broken")

    app = webhook_app(broken, lambda: "", Telemetry(CollectorRegistry()), 1 << 20)
    answer = asked(app, "/validate")
    assert answer.status_code == 500
    assert "internal error" in answer.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"webhook_tls_cert": "a"}, "right are both, for example webhook_tls_cert: tls.crt"),
        ({"resources": ["headroom.gpu/vram"]}, "it would be charged once more"),
        ({"resources": ["nvidia.com/gpu", "head*"]}, "it would be charged once more"),
        ({"scheduler_name": "No Name"}, "scheduler_name"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        load_settings(None, **given)
