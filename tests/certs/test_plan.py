"""What becomes of certificates as time goes on: nobody ever shows one that is not trusted yet."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from extender.certs.cluster import wanted
from extender.certs.pki import (
    BACKDATED,
    NotAPair,
    Pair,
    Usage,
    ends_at,
    facts,
    is_signed_by,
    new_leaf,
)
from extender.certs.plan import (
    Authority,
    Terms,
    authority_of,
    data_of,
    next_authority,
    next_leaf,
    usable,
)

NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)
DAY = timedelta(days=1)
#: A life in fast motion.
FAST = Terms(40 * DAY, 20 * DAY, 3 * DAY, 9 * DAY, 4 * DAY)
SERVING, CLIENT = wanted("headroom-system", ("10.96.0.53",))


def run(
    authority: Authority | None, leaf: Pair | None, now: datetime, terms: Terms = FAST
) -> tuple[Authority, Pair]:
    after = next_authority(authority, leaf, "serving", now, terms)
    return after, next_leaf(leaf, after, SERVING, now, terms)[0]


def trusted(leaf: Pair, bundle: bytes, now: datetime) -> bool:
    said = facts(leaf)
    authorities = x509.load_pem_x509_certificates(bundle)
    return said.made_at - BACKDATED <= now < said.ends_at and any(
        is_signed_by(leaf.cert, one.public_bytes(Encoding.PEM)) and now < one.not_valid_after_utc
        for one in authorities
    )


@pytest.mark.parametrize("seed", range(3))
def test_who_is_behind_by_a_run_trusts_who_is_not_and_the_other_way_round(
    seed: int,
) -> None:
    lots, now = random.Random(seed), NOW
    authority, leaf = run(None, None, now)
    before = authority, leaf
    authorities: set[bytes] = set()
    for _ in range(200):
        now += lots.uniform(0.3, 1.5) * DAY
        after = run(authority, leaf, now)
        for _, shown in (before, (authority, leaf), after):
            for trusts, _ in (before, (authority, leaf), after):
                assert trusted(shown, trusts.bundle(now), now)
        before, (authority, leaf) = (authority, leaf), after
        authorities.add(authority.current.cert)
    assert len(authorities) > 3  # each was followed by others


def test_a_run_while_all_is_well_changes_nothing() -> None:
    first = run(None, None, NOW)
    assert run(*first, NOW + DAY) == first


def test_a_next_authority_is_trusted_before_it_signs_and_the_old_one_for_a_while_after() -> None:
    authority, leaf = run(None, None, NOW)
    renewed = next_authority(authority, leaf, "serving", NOW, FAST, renew=True)
    assert renewed.current == authority.current
    assert renewed.coming is not None
    assert renewed.bundle(NOW) == authority.current.cert + renewed.coming.cert
    early = next_authority(renewed, leaf, "serving", NOW + FAST.settle - DAY, FAST)
    assert early == renewed
    now = NOW + FAST.settle
    promoted, new = run(renewed, leaf, now)
    assert promoted.current == renewed.coming
    assert is_signed_by(new.cert, renewed.coming.cert)
    assert promoted.bundle(now) == renewed.coming.cert + authority.current.cert
    assert run(promoted, new, now + FAST.settle)[0] == Authority(renewed.coming)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({"names": (*SERVING.names, "mine.example")}, "mine.example", id="a name more"),
        pytest.param({"usage": Usage.CLIENT}, "not for a client", id="another use"),
    ],
)
def test_a_certificate_that_is_not_what_is_wanted_is_replaced(
    change: dict[str, object], why: str
) -> None:
    authority, leaf = run(None, None, NOW)
    new, said = next_leaf(leaf, authority, replace(SERVING, **change), NOW, FAST)  # type: ignore[arg-type]
    assert why in said
    assert new != leaf


def test_an_authority_survives_its_secret_and_one_that_is_damaged_is_made_anew() -> None:
    authority, leaf = run(None, None, NOW)
    renewed = next_authority(authority, leaf, "serving", NOW, FAST, renew=True)
    data = {key: value for key, value in data_of("serving", renewed).items() if value is not None}
    assert authority_of("serving", data) == renewed
    for damage in ({"serving.key": b""}, {"serving.crt": b"-----BEGIN nothing"}):
        assert authority_of("serving", data | damage) is None
    other = data_of("serving", run(None, None, NOW)[0])
    swapped = data | {"serving.key": other["serving.key"] or b""}
    assert authority_of("serving", swapped) is None


def test_what_is_made_is_for_the_services_and_says_so() -> None:
    authority, leaf = run(None, None, NOW)
    said = facts(leaf)
    assert {"headroom-extender.headroom-system.svc", "headroom-webhook", "10.96.0.53"} <= said.names
    assert said.usages == {Usage.SERVER}
    assert said.ends_at == NOW + FAST.leaf_lifetime
    short = next_authority(None, None, "client", NOW, replace(FAST, authority_lifetime=DAY))
    client = next_leaf(None, short, CLIENT, NOW, FAST)[0]
    assert facts(client).usages == {Usage.CLIENT}
    assert ends_at(client.cert) == NOW + DAY  # not beyond its authority
    with pytest.raises(NotAPair, match="not that of the certificate"):
        facts(Pair(leaf.cert, client.key))
    assert usable(leaf.cert, client.key) is None
    assert not is_signed_by(client.cert, authority.current.cert)
    assert is_signed_by(
        new_leaf(short.current, "x", (), Usage.CLIENT, NOW, DAY).cert, short.current.cert
    )
