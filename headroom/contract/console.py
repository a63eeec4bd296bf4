"""The console's Service, and the sessions of its users.

A session is a random secret that the client generates. The client creates a
CertificateSigningRequest (CSR) that is named after the hash of the secret, and the API server
writes the name and the groups of the creator into it. So the console can identify the sender of a
secret without a token and without a key
(docs/design/adr/0091-users-of-the-console-send-no-token.md).
"""

import base64
import hashlib
import json
import re

#: The Service, and its name for the API server's proxy, which contains scheme, name and port.
SERVICE = "headroom-debug"
PROXIED = f"https:{SERVICE}:debug-tls"
#: The signer of the CSRs, which signs nothing. Tokens for the debug API have the same name as their
#: audience.
SIGNER = AUDIENCE = "headroom.gpu/console"
CSRS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
#: Header that contains the secret, because the API server removes ``Authorization`` before it
#: forwards a request.
HEADER = "Headroom-Session"
#: Lifetime of a session in seconds, from the creation of the CSR.
LIFETIME_S = 3600
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")


def csr_name(secret: str) -> str:
    """Return the name of the CSR of a session, or an empty string if ``secret`` is not a valid
    secret."""
    if not _SECRET.fullmatch(secret):
        return ""
    return f"headroom-console-{hashlib.sha256(secret.encode()).hexdigest()}"


def audiences(token: str) -> list[str]:
    """Return the audiences that a JWT claims, without verifying the JWT. Other tokens have none."""
    try:
        claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
        found = claims["aud"]
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [found] if isinstance(found, str) else found if isinstance(found, list) else []
