"""Reads when the certificate of a client expires."""

import ssl
from typing import Any

#: Key in an ASGI scope of the time at which the certificate expires, in Unix seconds. Without a
#: certificate, the key is absent.
CERTIFICATE_END = "headroom.certificate_end"


def certificate_end_s(connection: ssl.SSLObject) -> float | None:
    """Return when the client's certificate expires in Unix time, or None if it sent none."""
    parsed: Any = connection.getpeercert()
    return float(ssl.cert_time_to_seconds(parsed["notAfter"])) if parsed else None
