"""Whom a client certificate names: as Kubernetes reads it, of the subject alone.

TLS has checked the rest by then: that the cluster's CA signed it, for clients, and that it has
neither expired nor is to come. Nothing is ever taken from a header, which anybody can write.
"""

import hashlib
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Where an ASGI scope has the ``Peer`` of its connection; absent without TLS.
PEER = "headroom.peer"
#: Everybody's of whom the API server knows who they are.
_AUTHENTICATED = "system:authenticated"
_CREDENTIAL = "authentication.kubernetes.io/credential-id"


@dataclass(frozen=True, slots=True)
class User:
    """As the API server knows the bearer of a token or a certificate."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    #: Of what the authenticator tells beside these: to be passed on as it is.
    extra: Mapping[str, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class Certificate:
    """``user`` is None where it names nobody; it holds until ``not_after_s`` of Unix time."""

    user: User | None
    not_after_s: float
    #: Of all of it, in hexadecimal.
    sha256: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end; ``asked``: whether anybody could have shown a certificate."""

    asked: bool
    certificate: Certificate | None


def peer_of(connection: ssl.SSLObject) -> Peer:
    """Of a connection whose handshake is done."""
    asked = connection.context.verify_mode is not ssl.CERT_NONE
    # Empty for one that was not verified, though such are never asked for.
    parsed: Any = connection.getpeercert()
    whole = connection.getpeercert(binary_form=True)
    if not asked or not parsed or not whole:
        return Peer(asked, None)
    sha256 = hashlib.sha256(whole).hexdigest()
    not_after_s = float(ssl.cert_time_to_seconds(parsed["notAfter"]))
    return Peer(asked, Certificate(user_of(parsed["subject"], sha256), not_after_s, sha256))


def user_of(subject: Sequence[Sequence[tuple[str, str]]], sha256: str) -> User | None:
    """``subject`` is as ``ssl`` parses it: parts, each of pairs of a name and a value."""
    pairs = [pair for part in subject for pair in part]
    names = [value for name, value in pairs if name == "commonName"]
    if not names or not names[-1]:
        return None
    groups = tuple(value for name, value in pairs if name == "organizationName")
    extra = {_CREDENTIAL: [f"X509SHA256={sha256}"]}
    return User(names[-1], groups=(*groups, _AUTHENTICATED), extra=extra)
