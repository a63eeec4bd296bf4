"""Reads the user of a client certificate from its subject, as Kubernetes does.

TLS has already verified the certificate: the cluster's CA signed it for clients, and it is valid
now. The user is never read from a header, because any client can write a header.
"""

import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Key of the ``Peer`` in an ASGI scope. It is absent without TLS.
PEER = "headroom.peer"
#: Group of every authenticated user.
_AUTHENTICATED = "system:authenticated"
_CREDENTIAL = "authentication.kubernetes.io/credential-id"


@dataclass(frozen=True, slots=True)
class User:
    """The user of a token or a certificate, as the API server names it."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    #: Other attributes from the authenticator, passed on unchanged.
    extra: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class Certificate:
    """A verified client certificate. ``user`` is None if its subject has no common name."""

    user: User | None
    #: Time of expiry, as Unix time in seconds.
    not_after_s: float
    #: Digest of the whole certificate, in hexadecimal.
    sha256: str


@dataclass(frozen=True, slots=True)
class Peer:
    """The client of a TLS connection."""

    #: Whether the server requested a certificate.
    asked: bool
    #: None if the client sent no certificate.
    certificate: Certificate | None


def peer_of(connection: ssl.SSLObject) -> Peer:
    """Return the client of a connection whose handshake is complete."""
    asked = connection.context.verify_mode is not ssl.CERT_NONE
    # The result is empty for an unverified certificate, but the server verifies each certificate
    # that it requests.
    parsed: Any = connection.getpeercert()
    whole = connection.getpeercert(binary_form=True)
    if not asked or not parsed or not whole:
        return Peer(asked, None)
    sha256 = hashlib.sha256(whole).hexdigest()
    not_after_s = float(ssl.cert_time_to_seconds(parsed["notAfter"]))
    return Peer(asked, Certificate(user_of(parsed["subject"], sha256), not_after_s, sha256))


def user_of(subject: Sequence[Sequence[tuple[str, str]]], sha256: str) -> User | None:
    """Return the user of a subject, or None if it has no common name.

    ``subject`` has the form of ``ssl``: parts, each of (name, value) pairs.
    """
    pairs = [pair for part in subject for pair in part]
    names = [value for name, value in pairs if name == "commonName"]
    if not names or not names[-1]:
        return None
    groups = tuple(value for name, value in pairs if name == "organizationName")
    extra = {_CREDENTIAL: [f"X509SHA256={sha256}"]}
    return User(names[-1], groups=(*groups, _AUTHENTICATED), extra=extra)
