"""Installs the manifests on a real API server, with certificates from a real cert-manager.

    python -m tests.deploy.cert_manager

No test runs this module, because compiling cert-manager takes minutes. It uses the last version of
cert-manager whose commands Go can build. It prints the result as a line of JSON, or fails.
"""

import base64
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import yaml

from headroom.certs.cluster_secrets import wanted
from tests.certificates import Authority
from tests.controlplane import ControlPlane, built
from tests.deploy import foreign
from tests.deploy.installation import EXTENDER, SECRETS, token
from tests.deploy.rendered import DEPLOY, NAMESPACE, named_images, objects, run
from tests.processes import free_ports
from tests.waiting import PATIENCE_S, until

CONTROLLER, INJECTOR = "cert-manager-controller", "cert-manager-cainjector"
CERTIFICATES = f"/apis/cert-manager.io/v1/namespaces/{NAMESPACE}/certificates"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
VERBS_NAME = f"headroom-extender.{NAMESPACE}.svc"
BODY = json.dumps({"PodName": "p", "PodNamespace": "n", "PodUID": "u", "Node": "gpu-1"})


class Plane(ControlPlane):
    """A control plane with the Service addresses of kubeadm, because the extender's Service
    requests an address.
    """

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, "--service-cluster-ip-range=10.96.0.0/12")


def main() -> None:
    built(CONTROLLER, INJECTOR, "kubectl")
    plane = Plane()
    try:
        plane.start()
        found = check(plane)
    finally:
        plane.stop()
    typer.echo(json.dumps(found))


def check(plane: ControlPlane) -> dict[str, Any]:
    found: dict[str, Any] = {}
    apply(plane, "cert-manager's kinds", foreign.text(*foreign.CERT_MANAGER))
    text = rendered(plane.folder)
    left = [key for key in objects(text) if "headroom-certs" in key[2]]
    assert not left, f"of our own certificates there is still: {left}"
    seconds(lambda: apply(plane, "headroom", text), "all of it is applied")
    start_cert_manager(plane)
    found["signed_after_s"] = seconds(
        lambda: all(secret(plane, each.secret) for each in wanted(NAMESPACE)),
        "all Secrets",
    )
    found["injected_after_s"] = seconds(lambda: injected(plane), "the webhooks' caBundle")

    etc = plane.folder / "etc"
    mount(plane, etc)
    port = start_extender(plane, etc)
    client = etc / "client/tls.crt", etc / "client/tls.key"
    seconds(lambda: bind(port, etc, client) == 200, "an answer to kube-scheduler's certificate")
    outsider = Authority(plane.folder, "stranger-ca").sign("outsider")
    found["bind"] = {
        "with kube-scheduler's certificate": bind(port, etc, client),
        "without one": bind(port, etc, None),
        "with the serving certificate": bind(port, etc, (etc / "tls/tls.crt", etc / "tls/tls.key")),
        "with another CA's": bind(port, etc, (outsider.cert, outsider.key)),
    }
    assert [type(each) for each in found["bind"].values()] == [int, str, str, str], found

    before = serial(port, etc)
    for name in ("headroom-extender-tls", "headroom-scheduler-client"):
        renew(plane, name)
    mount(plane, etc)
    found["shown_after_renewal_s"] = seconds(
        lambda: serial(port, etc) != before, "the renewed certificate, without a restart"
    )
    assert bind(port, etc, client) == 200
    assert injected(plane)
    plane.raise_if_ended()
    return found


def rendered(folder: Path) -> str:
    """Return the objects of an overlay to which a user has added cert-manager and the cluster's own
    scheduler.
    """
    mine = folder / "overlay"
    mine.mkdir()
    overlay, *components = (
        os.path.relpath(DEPLOY / path, mine)
        for path in ("overlays/device-plugin", "default-scheduler", "components/cert-manager")
    )
    kustomization = {"resources": [overlay], "components": components}
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return named_images(run([built("kubectl")["kubectl"], "kustomize", mine], folder))


def apply(plane: ControlPlane, what: str, text: str) -> bool:
    """Apply the objects. Return False while some of their kinds are not served yet."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=plane.folder) as file:
        file.write(text)
        file.flush()
        try:
            plane.kubectl("apply", "--server-side", f"--filename={file.name}")
        except subprocess.CalledProcessError as err:
            if "no matches for kind" not in err.stderr and "not found" not in err.stderr:
                raise RuntimeError(f"{what}: {err.stderr}") from err
            return False
    return True


def start_cert_manager(plane: ControlPlane) -> None:
    binaries = built(CONTROLLER, INJECTOR)
    (port,) = free_ports(1)
    flags = f"--kubeconfig={plane.kubeconfig()}", "--leader-elect=false"
    metrics = f"--metrics-listen-address=127.0.0.1:{port}"
    plane.spawn(CONTROLLER, str(binaries[CONTROLLER]), *flags, metrics)
    plane.spawn(INJECTOR, str(binaries[INJECTOR]), *flags)


def secret(plane: ControlPlane, name: str) -> dict[str, bytes]:
    """Return the files of the Secret, or an empty dictionary if the Secret does not exist."""
    there = {each["metadata"]["name"]: each for each in plane.call("GET", SECRETS)["items"]}
    data = there.get(name, {}).get("data", {})
    files = {key: base64.b64decode(text) for key, text in data.items()}
    return files if {"tls.crt", "tls.key", "ca.crt"} <= files.keys() else {}


def injected(plane: ControlPlane) -> bool:
    """Return whether the webhook configurations contain the CA of the webhook."""
    trusted = base64.b64encode(secret(plane, "headroom-webhook-tls")["ca.crt"]).decode()
    bundles = [
        hook["clientConfig"].get("caBundle")
        for kind in ("validating", "mutating")
        for each in plane.call("GET", f"{ADMISSION}/{kind}webhookconfigurations")["items"]
        for hook in each["webhooks"]
    ]
    assert bundles
    return set(bundles) == {trusted}


def mount(plane: ControlPlane, etc: Path) -> None:
    """Write the Secrets that kubelets mount into the pods of kube-scheduler and the extender."""
    for folder, name in (("tls", "headroom-extender-tls"), ("client", "headroom-scheduler-client")):
        for key, content in secret(plane, name).items():
            file = etc / folder / key
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_bytes(content)
            new.rename(file)


def start_extender(plane: ControlPlane, etc: Path) -> int:
    kubeconfig = plane.folder / "extender.kubeconfig"
    plane.write_kubeconfig(kubeconfig, {"token": token(plane, EXTENDER)})
    verbs, debug = free_ports(2)
    plane.spawn(
        "extender",
        *(sys.executable, "-m", "headroom", "serve", "--debug-open", "--host=127.0.0.1"),
        *(f"--verbs-port={verbs}", f"--debug-port={debug}"),
        *(f"--tls-cert={etc}/tls/tls.crt", f"--tls-key={etc}/tls/tls.key"),
        f"--tls-client-ca={etc}/client/ca.crt",
        env={"KUBECONFIG": str(kubeconfig), "PYTHONPATH": str(DEPLOY.parent)},
    )
    return verbs


def bind(port: int, etc: Path, client: tuple[Path, Path] | None) -> int | str:
    """Send a bind request. Return the status of the response, or the error of the connection."""
    context = trusting(etc)
    if client:
        context.load_cert_chain(*client)
    try:
        with connected(port, context) as tls:
            connection = http.client.HTTPConnection(VERBS_NAME)
            connection.sock = tls
            connection.request("POST", "/bind", BODY, {"Content-Type": "application/json"})
            return connection.getresponse().status
    except (OSError, http.client.HTTPException) as err:
        return f"{type(err).__name__}: {err}"


def serial(port: int, etc: Path) -> str:
    """Return the serial number of the certificate that the port for kube-scheduler presents."""
    context = trusting(etc)
    context.load_cert_chain(etc / "client/tls.crt", etc / "client/tls.key")
    with connected(port, context) as tls:
        shown = tls.getpeercert()
    assert shown
    return str(shown["serialNumber"])


def trusting(etc: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(etc / "tls/ca.crt"))


def connected(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    return context.wrap_socket(raw, server_hostname=VERBS_NAME)


def renew(plane: ControlPlane, name: str) -> None:
    """Renew the certificate as ``cmctl renew`` does, and wait until the Secret has the new
    certificate.
    """
    before = secret(plane, name)["tls.crt"]
    condition = {
        "type": "Issuing",
        "status": "True",
        "reason": "ManuallyTriggered",
        "message": "renewed by the check",
        "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path = f"{CERTIFICATES}/{name}/status"
    status = plane.call("GET", f"{CERTIFICATES}/{name}")["status"]
    status["conditions"] = [*status.get("conditions", []), condition]
    plane.call("PATCH", path, {"status": status}, "application/merge-patch+json")
    seconds(lambda: secret(plane, name).get("tls.crt", before) != before, f"{name} is renewed")


def seconds(true: Callable[[], object], what: str) -> float:
    return round(until(true, what, PATIENCE_S, every_s=0.2), 1)


if __name__ == "__main__":
    typer.run(main)
