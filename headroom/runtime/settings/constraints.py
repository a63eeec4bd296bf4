"""Types of settings, and rules for settings that are valid alone but not in combination.

Each error message gives a valid example or a fix. Most rules protect ports, because any client that
reaches bind can bind pods, and any client that reaches an open debug API can read data about all
pods.
"""

import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import MAX_REPLICAS
from headroom.contract.quantity import MAX_DEVICE_BYTES, parse_bytes
from headroom.core.placement.policy import LargestDevice
from headroom.errors import BadSettings
from headroom.runtime.promql import check_matchers
from headroom.runtime.settings.ports import PortSettings


def _quantity(value: Any) -> Any:
    """Parse a Kubernetes quantity such as 64Mi. Return a number of bytes unchanged."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except BadQuantity as err:
            raise ValueError(f"{err}. Example: 64Mi") from err
    return value


def _largest_devices(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        largest_device(text)
    names = [text.partition("=")[0] for text in texts]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{repeated[0]} is set twice; remove one of the entries")
    return texts


def largest_device(text: str) -> LargestDevice:
    """Parse RESOURCE=MEMORY or RESOURCE=MEMORY/REPLICAS. Raises ``ValueError``."""
    resource, _, device = text.partition("=")
    memory, slash, replicas = device.partition("/")
    count = int(replicas) if replicas.isdecimal() and len(replicas) < 5 else 0 if slash else 1
    try:
        memory_bytes = parse_bytes(memory)
    except BadQuantity as err:
        raise ValueError(f"{text!r:.80}: {err}. Example: nvidia.com/gpu=80Gi") from err
    if not resource or not 0 < memory_bytes < MAX_DEVICE_BYTES or not 0 < count <= MAX_REPLICAS:
        raise ValueError(
            f"{text!r:.80} is not valid. Examples: nvidia.com/gpu=80Gi, or, for devices of 24 GiB "
            "with at least 4 replicas, nvidia.com/gpu.shared=24Gi/4"
        )
    return LargestDevice(resource, memory_bytes, count)


def _addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        try:
            parts = urlsplit(f"//{address}")
            is_valid = bool(parts.hostname) and parts.netloc == address and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid or "@" in address:
            raise ValueError(
                f"{address!r} is not an address. Examples: "
                "headroom-journal.headroom-system.svc or 10.1.2.3:8889"
            )
    return addresses


def _url(url: str) -> str:
    # The URL may contain a password, so the message does not quote it.
    try:
        parts = urlsplit(url)
        is_valid = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("is not a URL. Example: http://prometheus.monitoring:9090")
    return url


#: Names that a link template may contain in braces.
LINK_NAMES = ("node", "uuid", "namespace", "pod", "from_ms", "to_ms")


def _link_template(template: str) -> str:
    try:
        text = re.sub(rf"\{{({'|'.join(LINK_NAMES)})\}}", "1", template)
        parts, without_names = urlsplit(template), urlsplit(text)
        is_valid = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts[:3] == without_names[:3]
            and not set(text) & set("{} ")
        )
    except ValueError:
        is_valid = False
    if not is_valid:
        known = ", ".join(f"{{{name}}}" for name in LINK_NAMES)
        raise ValueError(
            f"is not a URL whose query may contain {known}. Example: "
            "https://grafana.example/d/headroom?var-node={node}&var-namespace={namespace}"
        )
    return template


#: Label matchers of a PromQL selector, without braces.
Matchers = Annotated[str, AfterValidator(check_matchers)]
QuantityBytes = Annotated[
    int, Field(ge=0), BeforeValidator(_quantity, json_schema_input_type=int | str)
]
#: Host names or IP addresses, each with or without a port.
Addresses = Annotated[tuple[str, ...], AfterValidator(_addresses)]
#: Texts that ``largest_device`` parses.
LargestDevices = Annotated[tuple[str, ...], AfterValidator(_largest_devices)]
#: An HTTP URL without query and fragment. It may contain a path prefix and a password.
Url = Annotated[str, AfterValidator(_url)]
#: An HTTP URL. Its query may contain ``LINK_NAMES`` in braces.
LinkTemplate = Annotated[str, AfterValidator(_link_template)]
Weight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class Contradiction(ValueError):
    """Settings that are invalid in combination. The message gives the reason and a fix."""

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


def is_loopback(host: str) -> bool:
    """Return whether only processes on this machine can reach the address ``host``."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # not an address but a name, which can resolve to any address
        return False


def prometheus_needs_url(
    prometheus_url: str | None, token_file: Path | None, ca: Path | None, matchers: str | None
) -> None:
    """Check the settings of Prometheus, which are the parameters."""
    given = {
        "prometheus_token_file": token_file,
        "prometheus_ca": ca,
        "prometheus_matchers": matchers,
    }
    for name, value in given.items():
        if value and prometheus_url is None:
            raise Contradiction(
                f"{name} is set without prometheus_url; set both. "
                "Example: prometheus_url: https://prometheus.monitoring:9090",
                name,
            )
    url = urlsplit(prometheus_url or "")
    if token_file is not None and url.scheme == "http" and not is_loopback(url.hostname or ""):
        raise Contradiction(
            "prometheus_token_file is set and prometheus_url is not encrypted, so others could "
            f"read the token; use https. Example: prometheus_url: https://{url.hostname}:9090",
            "prometheus_token_file",
        )


def _open_debug_needs_loopback(settings: PortSettings) -> None:
    name, host = settings.listen_address("debug_host")
    if settings.debug_open and not is_loopback(host):
        raise Contradiction(
            f"debug_open is set and {name} is {host}, so other machines can read the debug API "
            f"without authorization; set {name}: 127.0.0.1, or debug_open: false",
            "debug_open",
            name,
        )


def _remote_verbs_need_tls(settings: PortSettings) -> None:
    name, host = settings.listen_address("verbs_host")
    if is_loopback(host):
        return
    needed = ("tls_cert", "tls_key", "tls_client_ca")
    if missing := [each for each in needed if getattr(settings, each) is None]:
        raise Contradiction(
            f"{name} is {host}, so other machines can call bind, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; set all three (headroom certs "
            "creates Secrets with these files), or set verbs_host: 127.0.0.1",
            name,
        )


def check_scheduler_is_authenticated(settings: PortSettings) -> None:
    """Raise ``BadSettings`` if any process that reaches the loopback could bind the pods of a
    cluster.

    A loopback address is not a credential, because ``kubectl port-forward`` reaches the loopback of
    a pod.
    """
    if settings.tls_client_ca is None and not settings.insecure_verbs:
        raise BadSettings(
            "tls_client_ca is not set, so every process that reaches the port of kube-scheduler "
            "can bind any pod, also on loopback; set tls_cert, tls_key and tls_client_ca (headroom "
            "certs creates Secrets with these files). For a test cluster: insecure_verbs: true"
        )


def _tls_is_complete(settings: PortSettings) -> None:
    for prefix in ("", "debug_", "webhook_"):
        cert, key = f"{prefix}tls_cert", f"{prefix}tls_key"
        if (getattr(settings, cert) is None) != (getattr(settings, key) is None):
            given, missing = (cert, key) if getattr(settings, cert) else (key, cert)
            flag = f"--{prefix}tls".replace("_", "-")
            example = f"{flag}-cert tls.crt {flag}-key tls.key"
            if prefix == "webhook_":  # the webhook has no flags for its settings
                example = f"{cert}: tls.crt and {key}: tls.key"
            raise Contradiction(
                f"{given} is set and {missing} is not; set both. Example: {example}", given
            )
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise Contradiction(
            "tls_client_ca is set without tls_cert and tls_key; set all three. "
            "Example: --tls-cert tls.crt --tls-key tls.key --tls-client-ca ca.crt",
            "tls_client_ca",
        )


def peers_need_a_ca(settings: PortSettings, extenders: Sequence[str]) -> None:
    """Check that a console can verify the ``extenders`` that it connects to."""
    if extenders and settings.debug_tls_cert is not None and settings.peer_ca is None:
        raise Contradiction(
            "extenders and debug_tls_cert are set, so a console connects over TLS, "
            "but peer_ca, the CA that it trusts, is not set. "
            "Example: peer_ca: /etc/headroom/tls/ca.crt",
            "extenders",
        )


#: The rules run in this order. Each may raise ``Contradiction``, and the first error is reported.
PORT_RULES: tuple[Callable[[PortSettings], None], ...] = (
    _open_debug_needs_loopback,
    _remote_verbs_need_tls,
    _tls_is_complete,
)
