"""The settings of listen addresses and TLS."""

from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from headroom.runtime.server.tls import TlsFiles
from headroom.system.listening import without_brackets

#: A host name or an IP address. Brackets around an IPv6 address are removed.
ListenAddress = Annotated[str, AfterValidator(without_brackets)]


class MetricsAccess(Enum):
    AUTHORIZED = "authorized"
    OPEN = "open"


class PortSettings(BaseModel):
    """Addresses, ports and certificates of kube-scheduler's port, the debug API and the webhook."""

    host: ListenAddress = Field(
        "127.0.0.1",
        description="Listen address of kube-scheduler's port and of the debug API's port, unless "
        "verbs_host or debug_host is set. `::` is all addresses of IPv4 and IPv6, `0.0.0.0` those "
        "of IPv4.",
    )
    verbs_host: ListenAddress | None = Field(
        None,
        description="Listen address of kube-scheduler's port only. In a cluster, the "
        "port requires tls_cert, tls_key and tls_client_ca even on loopback, because any client "
        "that reaches bind can bind pods. Without a cluster, only other addresses require them.",
    )
    debug_host: ListenAddress | None = Field(
        None, description="Listen address of the debug API's port only."
    )
    insecure_verbs: bool = Field(
        False,
        description="In a cluster, serve kube-scheduler's port without client certificates. "
        "Allowed only if that port listens on loopback. Any process there can then bind pods, "
        "so use it in test clusters only.",
    )
    verbs_port: int = Field(
        8888, ge=0, le=65535, description="Port for kube-scheduler's calls, or 0 for any free port."
    )
    debug_port: int = Field(
        8889, ge=0, le=65535, description="Port of the debug API, or 0 for any free port."
    )
    debug_open: bool = Field(
        False,
        description="In a cluster, serve the debug API without authorization by the API server. "
        "Allowed only if the debug API listens on a loopback address.",
    )
    metrics_access: MetricsAccess = Field(
        MetricsAccess.AUTHORIZED,
        description="Who may read /metrics, which names pods of all tenants. authorized: clients "
        "whose user may get the path /metrics, as the API server decides; or open: every client. "
        "The agents have the same setting.",
    )
    debug_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate chain. If it is set, the debug API's port "
        "accepts TLS only. May be the same file as tls_cert.",
    )
    debug_tls_key: Path | None = Field(
        None, description="PEM file with the unencrypted private key of debug_tls_cert."
    )
    peer_ca: Path | None = Field(
        None,
        description="PEM file with CA certificates. If it is set, a console connects over TLS to "
        "the processes named in extenders. Their certificates must be from one of "
        "these CAs, and valid for the name in the setting.",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate chain. If it is set, kube-scheduler's port "
        "accepts TLS only.",
    )
    tls_key: Path | None = Field(
        None, description="PEM file with the unencrypted private key of tls_cert."
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with CA certificates. kube-scheduler's port accepts only clients "
        "with a certificate from one of them. Use a CA that signs no other certificates.",
    )
    webhook_port: int = Field(
        9443, ge=0, le=65535, description="Port of `headroom webhook`, or 0 for any free port."
    )
    webhook_tls_cert: Path | None = Field(
        None,
        description="PEM file with the certificate chain for the name of the webhook's Service. "
        "`headroom webhook` requires it, because API servers call webhooks over TLS only.",
    )
    webhook_tls_key: Path | None = Field(
        None, description="PEM file with the unencrypted private key of webhook_tls_cert."
    )

    def listen_address(self, name: str) -> tuple[str, str]:
        """Return the name of the setting that applies (``name`` or host), and the listen
        address."""
        address: str | None = getattr(self, name)
        return (name, address) if address is not None else ("host", self.host)

    @property
    def verbs_at(self) -> str:
        """The listen address of kube-scheduler's port."""
        return self.listen_address("verbs_host")[1]

    @property
    def debug_at(self) -> str:
        """The listen address of the debug API's port."""
        return self.listen_address("debug_host")[1]

    @property
    def tls(self) -> TlsFiles | None:
        """The TLS files of kube-scheduler's port, or None if it serves plain HTTP."""
        return self._tls_files("tls", self.tls_client_ca)

    @property
    def debug_tls(self) -> TlsFiles | None:
        """The TLS files of the debug API's port, or None if it serves plain HTTP."""
        return self._tls_files("debug_tls")

    @property
    def webhook_tls(self) -> TlsFiles | None:
        """The TLS files of the webhook, or None if they are not set and it cannot start."""
        return self._tls_files("webhook_tls")

    def _tls_files(self, prefix: str, client_ca: Path | None = None) -> TlsFiles | None:
        cert, key = getattr(self, f"{prefix}_cert"), getattr(self, f"{prefix}_key")
        return TlsFiles(cert, key, client_ca, prefix) if cert and key else None

    @property
    def served_certificates(self) -> dict[str, Path]:
        """The certificate file of each port of the extender that uses TLS, by the port's name."""
        files = {"verbs": self.tls_cert, "debug": self.debug_tls_cert}
        return {port: path for port, path in files.items() if path is not None}
