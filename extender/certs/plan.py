"""Decides which certificates to keep and which to create.

There are two CAs: one signs the certificate of the servers, the other only kube-scheduler's client
certificate. Certificates are renewed long before they expire. A CA is kept until it expires or its
Secret is deleted. Replacing it is a task for an administrator, because kube-scheduler reads the CA
that it trusts only when it starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from extender.certs.pki import (
    NotAPair,
    Pair,
    Usage,
    ends_at,
    facts,
    is_signed_by,
    new_authority,
    new_leaf,
)


@dataclass(frozen=True, slots=True)
class Terms:
    """The lifetimes of CAs and certificates, and how early certificates are renewed."""

    authority_lifetime: timedelta = timedelta(days=3650)
    leaf_lifetime: timedelta = timedelta(days=90)
    leaf_renewed_before: timedelta = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A CA and the one certificate that it signs."""

    #: Prefix of the CA's keys in its Secret.
    purpose: str
    #: The Secret of the certificate.
    secret: str
    #: The certificate's common name.
    name: str
    #: DNS names and IP addresses of a server.
    names: tuple[str, ...]
    usage: Usage


def authority_of(purpose: str, data: Mapping[str, bytes]) -> Pair | None:
    """Return the CA in a Secret; None if it is missing or invalid."""
    return usable(data.get(f"{purpose}.crt"), data.get(f"{purpose}.key"))


def data_of(purpose: str, authority: Pair) -> dict[str, bytes]:
    """Return a CA as the data of its Secret."""
    return {f"{purpose}.crt": authority.cert, f"{purpose}.key": authority.key}


def next_authority(authority: Pair | None, purpose: str, now: datetime, terms: Terms) -> Pair:
    """Return the existing CA, or a new one if it is missing or has expired."""
    if authority is not None and now < ends_at(authority.cert):
        return authority
    return new_authority(f"headroom-{purpose}-ca", now, terms.authority_lifetime)


def next_leaf(
    leaf: Pair | None, authority: Pair, wanted: Wanted, now: datetime, terms: Terms
) -> tuple[Pair, str]:
    """Return the certificate to serve, and why it replaces ``leaf``; "" if it is ``leaf``."""
    why = _renewal_reason(leaf, authority, wanted, now, terms)
    if leaf is not None and not why:
        return leaf, ""
    new = new_leaf(authority, wanted.name, wanted.names, wanted.usage, now, terms.leaf_lifetime)
    return new, why


def usable(cert: bytes | None, key: bytes | None) -> Pair | None:
    """Return the certificate and key as a pair; None if one is missing or they do not match."""
    if not cert or not key:
        return None
    pair = Pair(cert, key)
    try:
        facts(pair)
    except NotAPair:
        return None
    return pair


def _renewal_reason(
    leaf: Pair | None, authority: Pair, wanted: Wanted, now: datetime, terms: Terms
) -> str:
    if leaf is None:
        return "none existed"
    found = facts(leaf)
    if not is_signed_by(leaf.cert, authority.cert):
        return "another CA had signed it"
    if missing := sorted(set(wanted.names) - found.names):
        return f"it was not valid for {', '.join(missing)}"
    if wanted.usage not in found.usages:
        return f"it was not for a {wanted.usage.value}"
    due = found.ends_at - terms.leaf_renewed_before <= now
    if due and found.ends_at < ends_at(authority.cert):
        return f"it expires at {found.ends_at:%Y-%m-%dT%H:%M:%SZ}"
    return ""
