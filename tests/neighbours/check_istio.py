"""Tests gates in pods into which the real injector of Istio injects its proxy.

The injector runs the code of istiod with the configuration that Istio's chart renders. The API
server calls both webhooks in the order of their names, so it calls Headroom's webhook first.
"""

import base64
import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headroom.contract.gate import PORT, gate_container, is_gated
from headroom.contract.kube import Pod
from tests.admission.reviews import GATE_IMAGE, container, manifest
from tests.admission.site import ADMISSION, PODS, TEAM, Site, installed
from tests.certificates import Authority
from tests.controlplane import ControlPlane, built
from tests.processes import free_ports
from tests.waiting import until

INJECTOR = "istio-injector"
NAMESPACE = f"/api/v1/namespaces/{TEAM}"
LEVEL = "pod-security.kubernetes.io/enforce"
#: Fields that the restricted Pod Security standard requires in a container.
STRICT = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def site(plane: ControlPlane) -> Iterator[Site]:
    """A cluster with a webhook that adds gates, and a namespace in which Istio injects its
    proxy.
    """
    with installed(plane) as site:
        site.send("PATCH", NAMESPACE, {"metadata": {"labels": {"istio-injection": "enabled"}}})
        site.serve_webhook(gate_image=GATE_IMAGE)
        yield site


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("istio") / "charts"
    subprocess.run([str(built(INJECTOR)[INJECTOR]), "charts", str(folder)], check=True)
    return folder / "charts/istio-control/istio-discovery"


def rendered(chart: Path, *values: str) -> list[dict[str, Any]]:
    command = [str(built("helm")["helm"]), "template", "istiod", str(chart)]
    command += [
        "--namespace",
        "istio-system",
        "--set",
        "global.proxy.seccompProfile.type=RuntimeDefault",
    ]
    for each in values:
        command += ["--set", each]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


@pytest.fixture(params=["native sidecar", "ordinary sidecar"])
def is_native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "native sidecar")


@pytest.fixture(params=["CNI plugin", "init container"])
def has_cni(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "CNI plugin")


@pytest.fixture
def istio(
    site: Site, charts: Path, tmp_path: Path, is_native: bool, has_cni: bool
) -> Iterator[Site]:
    """The site with Istio's injector. As by default, the API server calls the injector once per
    pod.
    """
    with injecting(site, charts, tmp_path, is_native, has_cni, "Never"):
        yield site


@contextlib.contextmanager
def injecting(
    site: Site, charts: Path, tmp_path: Path, is_native: bool, has_cni: bool, reinvocation: str
) -> Iterator[None]:
    """Run Istio's injector. ``reinvocation`` is the chart's reinvocationPolicy."""
    objects = rendered(
        charts,
        f"pilot.cni.enabled={str(has_cni).lower()}",
        f"sidecarInjectorWebhook.reinvocationPolicy={reinvocation}",
    )
    (data,) = (
        each["data"]
        for each in objects
        if each["metadata"]["name"] == "istio-sidecar-injector" and each["kind"] == "ConfigMap"
    )
    for name in ("config", "values"):
        (tmp_path / name).write_text(data[name])
    authority, (port,) = Authority(tmp_path, "ca"), free_ports(1)
    signed = authority.sign("injector")
    files = [
        str(each) for each in (tmp_path / "config", tmp_path / "values", signed.cert, signed.key)
    ]
    site.plane.spawn(
        INJECTOR,
        *(str(built(INJECTOR)[INJECTOR]), "serve", *files, str(port)),
        env={"ENABLE_NATIVE_SIDECARS": str(is_native).lower()},
    )
    (configuration,) = (each for each in objects if each["kind"] == "MutatingWebhookConfiguration")
    for each in configuration["webhooks"]:
        bundle = base64.b64encode(authority.cert.read_bytes()).decode()
        each["clientConfig"] = {"url": f"https://127.0.0.1:{port}/inject", "caBundle": bundle}
    path = f"{ADMISSION}/mutatingwebhookconfigurations"
    try:
        until(lambda: listens(port), "the injector listens")
        assert site.send("POST", path, configuration).status == 201
        until(lambda: "istio-proxy" in names(create(site, gated=False)), "Istio injects")
        yield
    finally:
        site.send("DELETE", f"{path}/{configuration['metadata']['name']}")
        site.plane.kill(INJECTOR)
        until(lambda: "istio-proxy" not in names(create(site, gated=False)), "Istio is gone")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def pod(gated: bool) -> dict[str, Any]:
    """Return a pod that satisfies the restricted standard, with a GPU if it is ``gated``."""
    amounts = {"cpu": "1", "memory": "1Gi"} | ({"nvidia.com/gpu": "1"} if gated else {})
    main = container(resources={"limits": amounts, "requests": amounts}, securityContext=STRICT)
    own = container("own", 0, securityContext=STRICT)
    annotations = {"headroom.gpu/gated": "true"} if gated else {}
    spec: dict[str, Any] = {"initContainers": [own], "serviceAccountName": "default"}
    return manifest("8Gi" if gated else None, main, annotations=annotations, **spec)


def create(site: Site, gated: bool = True) -> dict[str, Any]:
    """Create the pod in a dry run. Return the object that the API server would store."""
    reply = site.send("POST", f"{PODS}?dryRun=All", pod(gated))
    assert reply.status == 201, reply.message
    return reply.body


def names(stored: dict[str, Any], key: str = "") -> list[str]:
    keys = [key] if key else ["initContainers", "containers"]
    return [each["name"] for key in keys for each in stored["spec"].get(key, ())]


def test_the_gate_is_recognised_and_runs_before_the_proxy(
    istio: Site, is_native: bool, has_cni: bool
) -> None:
    stored = create(istio)
    init = names(stored, "initContainers")
    redirects = "istio-validation" if has_cni else "istio-init"
    assert init[0] == "headroom-gate"
    assert {redirects, "own"} < set(init)
    assert ("istio-proxy" in init) is is_native
    assert is_gated(msgspec.convert(stored, Pod), GATE_IMAGE)
    gate = stored["spec"]["initContainers"][0]
    own = gate_container(GATE_IMAGE, gate["resources"]["limits"])
    assert {key: gate[key] for key in own} == own


def test_the_proxy_does_not_redirect_connections_of_the_gate(istio: Site) -> None:
    """Istio's CNI plugin reads the excluded ports from the annotation, and istio-init gets them as
    an argument.
    """
    stored = create(istio)
    key = "traffic.sidecar.istio.io/excludeOutboundPorts"
    assert stored["metadata"]["annotations"][key] == str(PORT)
    for each in stored["spec"]["initContainers"]:
        if each["name"] in ("istio-init", "istio-validation"):
            arguments = each["args"]
            assert arguments[arguments.index("-o") + 1] == str(PORT)


def test_the_restricted_pod_security_standard_accepts_gate_and_proxy(
    istio: Site, has_cni: bool
) -> None:
    """The standard rejects istio-init, because istio-init changes the network of the pod."""
    istio.send("PATCH", NAMESPACE, {"metadata": {"labels": {LEVEL: "restricted"}}})
    try:
        bare = manifest(None, container(gpus=0), serviceAccountName="default")
        until(
            lambda: "PodSecurity" in istio.send("POST", f"{PODS}?dryRun=All", bare).message,
            "the level is in force",
        )
        reply = istio.send("POST", f"{PODS}?dryRun=All", pod(gated=True))
        assert reply.status == (201 if has_cni else 403)
        assert has_cni or 'container "istio-init" must' in reply.message
        assert not has_cni or is_gated(msgspec.convert(reply.body, Pod), GATE_IMAGE)
    finally:
        istio.send("PATCH", NAMESPACE, {"metadata": {"labels": {LEVEL: None}}})


def test_an_injector_that_always_runs_last_is_reported(
    site: Site, charts: Path, tmp_path: Path
) -> None:
    """Istio inserts its native sidecar before all other containers. The API server calls each
    webhook at most twice, in the order of their names, so the last call is to Istio's injector.
    """
    with injecting(site, charts, tmp_path, True, True, "IfNeeded"):
        reply = site.send("POST", f"{PODS}?dryRun=All", pod(gated=True))
    assert reply.status == 422
    assert "another webhook put init container 'istio-validation' before it" in reply.message
