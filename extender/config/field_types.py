"""Kinds of values that people write in files, and what of each is refused, with a right example."""

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from contract.errors import BadQuantity
from contract.quantity import parse_bytes


def _quantity(value: Any) -> Any:
    """A Kubernetes quantity, as in 64Mi, or a number of bytes."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except BadQuantity as err:
            raise ValueError(f"{err}; right is, for example, 64Mi") from err
    return value


def _places(places: tuple[str, ...]) -> tuple[str, ...]:
    for place in places:
        try:
            parts = urlsplit(f"//{place}")
            sound = bool(parts.hostname) and parts.netloc == place and parts.port != 0
        except ValueError:
            sound = False
        if not sound or "@" in place:
            raise ValueError(
                f"{place!r} is no place; right is, for example, "
                "headroom-journal.headroom-system.svc or 10.1.2.3:8889"
            )
    return places


def _url(url: str) -> str:
    # The value may hold a password, so it is not quoted.
    try:
        parts = urlsplit(url)
        sound = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        sound = False
    if not sound:
        raise ValueError("is no URL; right is, for example, http://prometheus.monitoring:9090")
    return url


QuantityBytes = Annotated[int, BeforeValidator(_quantity), Field(ge=0)]
#: Names or addresses, each with a port or without.
Places = Annotated[tuple[str, ...], AfterValidator(_places)]
#: Without a query; a path before the one that is asked for, and a password, are no mistake.
Url = Annotated[str, AfterValidator(_url)]
Weight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]
