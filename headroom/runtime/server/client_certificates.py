"""Reads until when the certificate of a client is valid."""

import ssl
from typing import Any

#: Key of the time in an ASGI scope, as Unix time in seconds. It is absent without a certificate.
CERTIFICATE_END = "headroom.certificate_end"


def certificate_end_s(connection: ssl.SSLObject) -> float | None:
    """Return when the certificate ends with which the client authenticated, if there is one."""
    parsed: Any = connection.getpeercert()
    return float(ssl.cert_time_to_seconds(parsed["notAfter"])) if parsed else None
