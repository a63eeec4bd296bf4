"""Which settings cannot go together, each of which is right by itself; and what would be.

Most of it is about who reaches a port: whoever reaches bind can have pods bound, and whoever
reaches the debug API can read of everybody's.
"""

from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extender.config.settings import Settings


class Contradiction(ValueError):
    """These settings cannot go together; the text says why, and what is right."""

    def __init__(self, message: str, *settings: str) -> None:
        super().__init__(message)
        self.settings = settings


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine's own processes reaches it."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name may stand for anything
        return False


def _prometheus_is_named(settings: "Settings") -> None:
    for name in ("prometheus_token_file", "prometheus_ca"):
        if getattr(settings, name) is not None and settings.prometheus_url is None:
            raise Contradiction(
                f"{name} is set without prometheus_url; right are both, for example "
                "prometheus_url: https://prometheus.monitoring:9090",
                name,
            )


def _open_on_loopback_alone(settings: "Settings") -> None:
    name, host = settings.where("debug_host")
    if settings.debug_open and not is_loopback(host):
        raise Contradiction(
            f"debug_open is set and {name} is {host}, where others than this machine's own "
            f"processes can read it; right is {name}: 127.0.0.1, or debug_open: false",
            "debug_open",
            name,
        )


def _strangers_bind_nothing(settings: "Settings") -> None:
    name, host = settings.where("verbs_host")
    if settings.insecure_verbs or is_loopback(host):
        return
    needed = ("tls_cert", "tls_key", "tls_client_ca")
    if missing := [each for each in needed if getattr(settings, each) is None]:
        raise Contradiction(
            f"{name} is {host}, where others than this machine's own processes can have us "
            f"bind pods, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; right are all three, for example "
            "those of the Secrets that headroom certs makes, or verbs_host: 127.0.0.1, or "
            "insecure_verbs: true where a NetworkPolicy of yours keeps everybody else away",
            name,
        )


def _tls_is_whole(settings: "Settings") -> None:
    for begin in ("", "debug_", "webhook_"):
        cert, key = f"{begin}tls_cert", f"{begin}tls_key"
        if (getattr(settings, cert) is None) != (getattr(settings, key) is None):
            given, missing = (cert, key) if getattr(settings, cert) else (key, cert)
            flag = f"--{begin}tls".replace("_", "-")
            right = f"{flag}-cert tls.crt {flag}-key tls.key"
            if begin == "webhook_":  # which has no flags
                right = f"{cert}: tls.crt and {key}: tls.key"
            raise Contradiction(
                f"{given} is set and {missing} is not; right are both, for example {right}",
                given,
            )
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise Contradiction(
            "tls_client_ca is set without tls_cert and tls_key; right are all three, "
            "for example --tls-cert tls.crt --tls-key tls.key --tls-client-ca ca.crt",
            "tls_client_ca",
        )


#: Each raises ``Contradiction``; the first that does is told of.
RULES: tuple[Callable[["Settings"], None], ...] = (
    _prometheus_is_named,
    _open_on_loopback_alone,
    _strangers_bind_nothing,
    _tls_is_whole,
)
