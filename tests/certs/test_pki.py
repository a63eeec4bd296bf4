"""Tests how certificates are renewed as time passes."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from headroom.certs.cluster_secrets import wanted
from headroom.certs.pki import (
    NotAPair,
    Pair,
    Terms,
    Usage,
    authority_of,
    data_of,
    ends_at,
    ends_soon,
    facts,
    is_signed_by,
    new_leaf,
    next_authority,
    next_leaf,
    usable,
)

NOW = datetime(2026, 11, 22, 9, 0, tzinfo=UTC)
DAY = timedelta(days=1)
FAST = Terms(40 * DAY, 9 * DAY, 4 * DAY)
SERVING, CONSOLE, WEBHOOK, *_, CLIENT = wanted("headroom-system", ("10.96.0.53",))


def run(authority: Pair | None, leaf: Pair | None, now: datetime) -> tuple[Pair, Pair]:
    after = next_authority(authority, "serving", now, FAST)
    return after, next_leaf(leaf, after, SERVING, now, FAST)[0]


def test_certificates_are_renewed_until_their_authority_ends() -> None:
    first, leaf = run(None, None, NOW)
    shown = {leaf.cert}
    for day in range(1, 40):
        now = NOW + day * DAY
        authority, leaf = run(first, leaf, now)
        assert authority == first
        assert is_signed_by(leaf.cert, first.cert)
        assert facts(leaf).ends_at > now
        shown.add(leaf.cert)
    # There is a new certificate every 5 days. The last certificate ends together with the
    # authority, because it cannot be valid longer than the authority.
    assert len(shown) == 8
    second, leaf = run(first, leaf, NOW + 40 * DAY)
    assert second != first
    assert is_signed_by(leaf.cert, second.cert)


def test_a_run_without_due_certificates_changes_nothing() -> None:
    first = run(None, None, NOW)
    assert run(*first, NOW + DAY) == first


def test_a_new_authority_signs_certificates_at_once() -> None:
    old, leaf = run(None, None, NOW)
    new, signed = run(None, leaf, NOW)
    assert new != old
    assert is_signed_by(signed.cert, new.cert)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(
            {"names": (*SERVING.names, "mine.example")}, "mine.example", id="an additional name"
        ),
        pytest.param({"usage": Usage.CLIENT}, "not for a client", id="another use"),
    ],
)
def test_a_certificate_that_does_not_match_its_settings_is_replaced(
    change: dict[str, object], why: str
) -> None:
    authority, leaf = run(None, None, NOW)
    new, message = next_leaf(leaf, authority, replace(SERVING, **change), NOW, FAST)  # type: ignore[arg-type]
    assert why in message
    assert new != leaf


def test_an_authority_is_read_from_its_secret_and_a_damaged_one_is_not_used() -> None:
    authority, _ = run(None, None, NOW)
    data = data_of("serving", authority)
    assert authority_of("serving", data) == authority
    for damage in ({"serving.key": b""}, {"serving.crt": b"-----BEGIN nothing"}):
        assert authority_of("serving", data | damage) is None
    other = data_of("serving", run(None, None, NOW)[0])
    assert authority_of("serving", data | {"serving.key": other["serving.key"]}) is None


def test_certificates_are_for_the_services_and_labelled() -> None:
    authority, leaf = run(None, None, NOW)
    message = facts(leaf)
    assert {
        "headroom-extender.headroom-system.svc",
        "headroom-journal",
        "10.96.0.53",
    } <= message.names
    assert message.usages == {Usage.SERVER}
    assert message.ends_at == NOW + FAST.leaf_lifetime
    short = next_authority(None, "client", NOW, replace(FAST, authority_lifetime=DAY))
    client = next_leaf(None, short, CLIENT, NOW, FAST)[0]
    assert facts(client).usages == {Usage.CLIENT}
    assert (
        ends_at(client.cert) == NOW + DAY
    )  # The certificate is not valid longer than its authority.
    with pytest.raises(NotAPair, match="does not match the certificate"):
        facts(Pair(leaf.cert, client.key))
    assert usable(leaf.cert, client.key) is None
    assert not is_signed_by(client.cert, authority.cert)
    assert is_signed_by(new_leaf(short, "x", (), Usage.CLIENT, NOW, DAY).cert, short.cert)


def test_an_authority_counts_as_expiring_when_its_certificates_cannot_be_renewed() -> None:
    """An authority counts as expiring 4 days before its end, because a certificate that is renewed
    then would not be valid longer.
    """
    authority, leaf = run(None, None, NOW)
    assert not ends_soon(authority, NOW + 36 * DAY - timedelta(seconds=1), FAST)
    assert ends_soon(authority, NOW + 36 * DAY, FAST)
    _, last = run(authority, leaf, NOW + 35 * DAY)
    assert facts(last).ends_at == ends_at(authority.cert)
    assert run(authority, last, NOW + 39 * DAY) == (authority, last)
