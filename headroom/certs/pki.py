"""Creates, inspects and renews keys and X.509 certificates in PEM.

There are two CAs. One signs only the certificates of the servers, the other only kube-scheduler's
client certificate. Certificates are renewed long before they expire. A CA is replaced only if it
has expired, or if its Secret is missing or invalid. An administrator must replace it before it
expires, because kube-scheduler reads its trusted CA only at startup. ``headroom certs`` reports
when this is due.

All keys are P-256, unencrypted in PKCS #8. Times are aware datetimes in UTC.
"""

import ipaddress
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

#: A certificate is valid from this long before its creation, because clocks differ.
BACKDATED = timedelta(minutes=5)


class Usage(Enum):
    SERVER = "server"
    CLIENT = "client"


_OID = {
    Usage.SERVER: ExtendedKeyUsageOID.SERVER_AUTH,
    Usage.CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH,
}


class NotAPair(Exception):
    """Data that is not a certificate and its key; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, in PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Facts:
    """The fields of a certificate that determine whether it must be renewed."""

    ends_at: datetime
    #: DNS names and IP addresses, as the certificate spells them.
    names: Set[str]
    usages: Set[Usage]


def new_authority(name: str, now: datetime, lifetime: timedelta) -> Pair:
    """Create a self-signed CA that can sign certificates of servers and clients, but no other
    CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = (
        _builder(subject, subject, key.public_key(), now, now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
    )
    return _signed(builder, key, key)


def new_leaf(
    authority: Pair,
    name: str,
    names: Sequence[str],
    usage: Usage,
    now: datetime,
    lifetime: timedelta,
) -> Pair:
    """Create a certificate for a server with these ``names``, or for a client.

    ``names`` are DNS names and IP addresses. The certificate expires no later than its CA.
    """
    issuer = x509.load_pem_x509_certificate(authority.cert)
    signer = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    ends_at = min(now + lifetime, issuer.not_valid_after_utc)
    builder = (
        _builder(_name(name), issuer.subject, key.public_key(), now, ends_at)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_OID[usage]]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names:
        general = [_general_name(each) for each in names]
        builder = builder.add_extension(x509.SubjectAlternativeName(general), critical=False)
    return _signed(builder, key, signer)


def facts(pair: Pair) -> Facts:
    """Read the facts of a certificate.

    Raises ``NotAPair`` if the certificate or key cannot be read, or if they do not match.
    """
    cert = _cert(pair.cert)
    try:
        key = serialization.load_pem_private_key(pair.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as err:
        raise NotAPair("the key is not an unencrypted private key in PEM") from err
    if not hasattr(key, "public_key") or key.public_key() != cert.public_key():
        raise NotAPair("the key does not match the certificate")
    names, usages = set[str](), set[Usage]()
    with suppress(x509.ExtensionNotFound):
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names.update(found.get_values_for_type(x509.DNSName))
        names.update(map(str, found.get_values_for_type(x509.IPAddress)))
    with suppress(x509.ExtensionNotFound):
        oids = set(cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        usages.update(usage for usage, oid in _OID.items() if oid in oids)
    return Facts(cert.not_valid_after_utc, names, usages)


def ends_at(cert: bytes) -> datetime:
    """Return the expiry time. Raises ``NotAPair`` if ``cert`` is not a certificate."""
    return _cert(cert).not_valid_after_utc


def is_signed_by(cert: bytes, authority: bytes) -> bool:
    """Return whether ``authority`` signed ``cert``.

    Raises ``NotAPair`` if one of them is not a certificate.
    """
    try:
        _cert(cert).verify_directly_issued_by(_cert(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _cert(pem: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as err:
        raise NotAPair("it is not a certificate in PEM") from err


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    ends_at: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - BACKDATED)
        .not_valid_after(ends_at.astimezone(UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
) -> Pair:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(builder.sign(signer, hashes.SHA256()).public_bytes(pem), private)


@dataclass(frozen=True, slots=True)
class Terms:
    """The lifetimes of CAs and certificates, and how early certificates are renewed."""

    authority_lifetime: timedelta = timedelta(days=3650)
    leaf_lifetime: timedelta = timedelta(days=90)
    leaf_renewed_before: timedelta = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A certificate, and the CA that signs it."""

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
    """Return the CA in a Secret, or None if it is missing or invalid."""
    return usable(data.get(f"{purpose}.crt"), data.get(f"{purpose}.key"))


def data_of(purpose: str, authority: Pair) -> dict[str, bytes]:
    """Return the data of the Secret that stores a CA."""
    return {f"{purpose}.crt": authority.cert, f"{purpose}.key": authority.key}


def next_authority(authority: Pair | None, purpose: str, now: datetime, terms: Terms) -> Pair:
    """Return the existing CA, or a new one if it is missing or has expired."""
    if authority is not None and now < ends_at(authority.cert):
        return authority
    return new_authority(f"headroom-{purpose}-ca", now, terms.authority_lifetime)


def ends_soon(authority: Pair, now: datetime, terms: Terms) -> bool:
    """Return whether the CA expires so soon that its certificates cannot be renewed any more.

    A certificate expires no later than its CA, so a new certificate would not be valid for longer.
    """
    return ends_at(authority.cert) - terms.leaf_renewed_before <= now


def next_leaf(
    leaf: Pair | None, authority: Pair, wanted: Wanted, now: datetime, terms: Terms
) -> tuple[Pair, str]:
    """Return the certificate to use, and why it replaces ``leaf``, or "" if ``leaf`` is kept."""
    why = _renewal_reason(leaf, authority, wanted, now, terms)
    if leaf is not None and not why:
        return leaf, ""
    new = new_leaf(authority, wanted.name, wanted.names, wanted.usage, now, terms.leaf_lifetime)
    return new, why


def usable(cert: bytes | None, key: bytes | None) -> Pair | None:
    """Return certificate and key as a pair, or None if one is missing or they do not match."""
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
    """Return why ``leaf`` must be replaced, or "" if it need not be."""
    if leaf is None:
        return "none existed"
    found = facts(leaf)
    if not is_signed_by(leaf.cert, authority.cert):
        return "another CA had signed it"
    if missing := sorted(set(wanted.names) - found.names):
        return f"it was not valid for {', '.join(missing)}"
    if wanted.usage not in found.usages:
        return f"it was not for a {wanted.usage.value}"
    is_due = found.ends_at - terms.leaf_renewed_before <= now
    # A new certificate cannot expire later than its CA, so replacing this one may gain nothing.
    if is_due and found.ends_at < ends_at(authority.cert):
        return f"it expires at {found.ends_at:%Y-%m-%dT%H:%M:%SZ}"
    return ""
