"""What is to become of our certificates now, given those that there are.

Two authorities, one for what we serve and one for kube-scheduler's client certificate, which signs
for nobody else. Each signs one certificate. An authority is followed by the next one in steps, each
of which is done when a run finds it due, so that a run that was missed or that died costs nothing:

1. the next authority is made, and is trusted beside the current one from then on (``bundle``);
2. when that has had time to arrive everywhere (``settle``), it becomes the current one and signs;
   the old one is trusted still, since what it signed is served for a moment more;
3. when the new certificate has had that time too, the old one is trusted no more.

So at no moment does anybody show a certificate that the other side does not trust yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """How long certificates are valid, and how long before their end others follow."""

    authority_lifetime: timedelta = timedelta(days=3650)
    authority_renewed_before: timedelta = timedelta(days=365)
    #: Between the steps by which an authority follows another. kube-scheduler reads the authority
    #: that it trusts when it starts and never again, so this is time to restart it in.
    settle: timedelta = timedelta(days=30)
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


@dataclass(frozen=True, slots=True)
class Authority:
    current: Pair
    coming: Pair | None = None
    #: The certificate of the one before; its key is forgotten.
    old: bytes | None = None

    def bundle(self, now: datetime) -> bytes:
        """All that is to be trusted, in PEM, the one that signs first."""
        coming = self.coming.cert if self.coming else None
        trusted = [cert for cert in (coming, self.old) if cert and ends_at(cert) > now]
        return b"".join([self.current.cert, *trusted])


def authority_of(purpose: str, data: Mapping[str, bytes]) -> Authority | None:
    """The authority as a Secret holds it; None where there is none that can be used."""
    current = _pair(data, purpose)
    if current is None:
        return None
    old = data.get(f"{purpose}-old.crt")
    try:
        if old is not None:
            ends_at(old)
    except NotAPair:
        old = None
    return Authority(current, _pair(data, f"{purpose}-next"), old)


def data_of(purpose: str, authority: Authority) -> dict[str, bytes | None]:
    """The same the other way round; None for a key that is not to be there."""
    coming = authority.coming
    return {
        f"{purpose}.crt": authority.current.cert,
        f"{purpose}.key": authority.current.key,
        f"{purpose}-next.crt": coming.cert if coming else None,
        f"{purpose}-next.key": coming.key if coming else None,
        f"{purpose}-old.crt": authority.old,
    }


def next_authority(
    authority: Authority | None,
    signed: Pair | None,
    purpose: str,
    now: datetime,
    terms: Terms,
    renew: bool = False,
) -> Authority:
    """The authority as it is to be now; ``signed`` is what it last signed, and ``renew`` begins
    step 1 before its time."""

    def new() -> Pair:
        return new_authority(f"headroom-{purpose}-ca", now, terms.authority_lifetime)

    if authority is None or ends_at(authority.current.cert) <= now:
        return Authority(new())
    coming = authority.coming
    if coming is not None and facts(coming).made_at + terms.settle <= now:
        return Authority(coming, old=authority.current.cert)
    if coming is None and authority.old is None:
        due = ends_at(authority.current.cert) - terms.authority_renewed_before <= now
        return replace(authority, coming=new()) if due or renew else authority
    if authority.old is not None and signed is not None:
        by_current = is_signed_by(signed.cert, authority.current.cert)
        if by_current and facts(signed).made_at + terms.settle <= now:
            return replace(authority, old=None)
    return authority


def next_leaf(
    leaf: Pair | None, authority: Authority, wanted: Wanted, now: datetime, terms: Terms
) -> tuple[Pair, str]:
    """What is to be shown now, and why it is another than the one there is; "" where it is not."""
    why = _why_not(leaf, authority, wanted, now, terms)
    if leaf is not None and not why:
        return leaf, ""
    new = new_leaf(
        authority.current, wanted.name, wanted.names, wanted.usage, now, terms.leaf_lifetime
    )
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
    leaf: Pair | None, authority: Authority, wanted: Wanted, now: datetime, terms: Terms
) -> str:
    if leaf is None:
        return "there was none"
    said = facts(leaf)
    if not is_signed_by(leaf.cert, authority.current.cert):
        return "another authority had signed it"
    if missing := sorted(set(wanted.names) - said.names):
        return f"it was not for {', '.join(missing)}"
    if wanted.usage not in said.usages:
        return f"it was not for a {wanted.usage.value}"
    if said.ends_at - terms.leaf_renewed_before <= now:
        return f"it ends at {said.ends_at:%Y-%m-%dT%H:%M:%SZ}"
    return ""


def _pair(data: Mapping[str, bytes], name: str) -> Pair | None:
    return usable(data.get(f"{name}.crt"), data.get(f"{name}.key"))
