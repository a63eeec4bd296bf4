"""Decides what becomes of the certificates, given those that exist.

There are two authorities: one signs what the ports show, the other kube-scheduler's client
certificate and nothing else. Certificates are renewed long before their end. An authority is kept
until its end, or until its Secret is deleted: replacing it is a step for an admin, because
kube-scheduler reads the authority that it trusts only when it starts.
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
    """How long authorities and certificates are valid, and how early certificates are renewed."""

    authority_lifetime: timedelta = timedelta(days=3650)
    leaf_lifetime: timedelta = timedelta(days=90)
    leaf_renewed_before: timedelta = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One authority and the one certificate that it signs."""

    #: Begins the keys of the authority in its Secret.
    purpose: str
    #: The Secret of what is signed.
    secret: str
    #: Common name of what is signed.
    name: str
    #: DNS names and addresses of a server.
    names: tuple[str, ...]
    usage: Usage


def authority_of(purpose: str, data: Mapping[str, bytes]) -> Pair | None:
    """The authority that a Secret holds; None if there is none that can be used."""
    return usable(data.get(f"{purpose}.crt"), data.get(f"{purpose}.key"))


def data_of(purpose: str, authority: Pair) -> dict[str, bytes]:
    return {f"{purpose}.crt": authority.cert, f"{purpose}.key": authority.key}


def next_authority(authority: Pair | None, purpose: str, now: datetime, terms: Terms) -> Pair:
    """The authority that there is, or a new one if it has ended."""
    if authority is not None and now < ends_at(authority.cert):
        return authority
    return new_authority(f"headroom-{purpose}-ca", now, terms.authority_lifetime)


def next_leaf(
    leaf: Pair | None, authority: Pair, wanted: Wanted, now: datetime, terms: Terms
) -> tuple[Pair, str]:
    """What is to be shown now, and why it is another than the one there is; "" where it is not."""
    why = _why_not(leaf, authority, wanted, now, terms)
    if leaf is not None and not why:
        return leaf, ""
    new = new_leaf(authority, wanted.name, wanted.names, wanted.usage, now, terms.leaf_lifetime)
    return new, why


def usable(cert: bytes | None, key: bytes | None) -> Pair | None:
    """The pair, where it is one."""
    if not cert or not key:
        return None
    pair = Pair(cert, key)
    try:
        facts(pair)
    except NotAPair:
        return None
    return pair


def _why_not(
    leaf: Pair | None, authority: Pair, wanted: Wanted, now: datetime, terms: Terms
) -> str:
    if leaf is None:
        return "there was none"
    said = facts(leaf)
    if not is_signed_by(leaf.cert, authority.cert):
        return "another authority had signed it"
    if missing := sorted(set(wanted.names) - said.names):
        return f"it was not for {', '.join(missing)}"
    if wanted.usage not in said.usages:
        return f"it was not for a {wanted.usage.value}"
    due = said.ends_at - terms.leaf_renewed_before <= now
    if due and said.ends_at < ends_at(authority.cert):
        return f"it ends at {said.ends_at:%Y-%m-%dT%H:%M:%SZ}"
    return ""
