"""Types of settings, with validators whose error messages end with a valid example."""

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from contract.errors import BadQuantity
from contract.quantity import parse_bytes


def _quantity(value: Any) -> Any:
    """Parse a Kubernetes quantity such as 64Mi; numbers of bytes are returned unchanged."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except BadQuantity as err:
            raise ValueError(f"{err}. Example: 64Mi") from err
    return value


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


QuantityBytes = Annotated[int, BeforeValidator(_quantity), Field(ge=0)]
#: Host names or IP addresses, each with or without a port.
Addresses = Annotated[tuple[str, ...], AfterValidator(_addresses)]
#: An HTTP URL without query or fragment. It may contain a path prefix and a password.
Url = Annotated[str, AfterValidator(_url)]
Weight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
