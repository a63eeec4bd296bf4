"""Runs the admission webhook in a separate process, as ``headroom webhook`` runs in a cluster."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.certificates import Authority, Certificate
from tests.processes import Processes, free_ports
from tests.waiting import PATIENCE_S, until


@dataclass(frozen=True, slots=True)
class WebhookServer:
    """A webhook process that listens on loopback."""

    plane: Processes
    name: str
    port: int
    authority: Authority
    #: Port that serves the kubelet's probes.
    probes_port: int

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.authority.cert))
        return httpx.Client(base_url=self.url, verify=context, timeout=PATIENCE_S, trust_env=False)

    def prober(self) -> httpx.Client:
        """Return an HTTP client that sends probes as a kubelet does."""
        url = f"http://127.0.0.1:{self.probes_port}"
        return httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def is_ready(self) -> bool:
        self.plane.raise_if_ended()
        try:
            with self.client() as http:
                return http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self.plane.runs(self.name):
            self.plane.kill(self.name)


def start_webhook(
    plane: Processes,
    name: str,
    authority: Authority,
    kubeconfig: Path,
    *,
    certificate: Certificate | None = None,
    port: int = 0,
    module: str = "headroom",
    **settings: Any,
) -> WebhookServer:
    """Start a webhook and wait until it has listed its objects. ``settings`` are written to its
    settings file.
    """
    signed = certificate or authority.sign("webhook")
    free, probes = free_ports(2)
    server = WebhookServer(plane, name, port or free, authority, probes)
    given = {
        "webhook_port": server.port,
        "debug_port": server.probes_port,
        "webhook_tls_cert": str(signed.cert),
        "webhook_tls_key": str(signed.key),
        # Serve probes and metrics on loopback, without TLS and without a token for readers.
        "debug_open": True,
        **settings,
    }
    config = plane.folder / f"{name}.headroom.yaml"
    config.write_text(yaml.safe_dump(given))
    plane.fork(
        name,
        *(module, "webhook", "--config", str(config)),
        env={"KUBECONFIG": str(kubeconfig)},
    )
    until(server.is_ready, f"{name} has listed what it needs")
    return server
