"""Tests how users' annotations are parsed, and the errors of invalid annotations."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headroom.contract import annotations as an
from headroom.contract.annotations import Bytes, DeviceChoice, ScoringPolicy, Share, VramAnnotation
from headroom.contract.errors import BadAnnotation

PPM = 1_000_000
MAX_DEVICE_BYTES = 1 << 44

GI = 1 << 30

amounts = st.builds(Bytes, st.integers(1, MAX_DEVICE_BYTES)) | st.builds(Share, st.integers(1, PPM))
containers = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)
vrams = st.builds(VramAnnotation, everywhere=amounts) | st.builds(
    VramAnnotation,
    by_container=st.dictionaries(containers, amounts, min_size=1).map(MappingProxyType),
)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8Gi", Bytes(8 * GI)),
        (" 8192Mi\n", Bytes(8 * GI)),
        ("8G", Bytes(8 * 10**9)),
        ("1.5Gi", Bytes(3 * GI // 2)),
        ("16Ti", Bytes(MAX_DEVICE_BYTES)),
        ("25%", Share(250_000)),
        ("12.5%", Share(125_000)),
        ("0.0001%", Share(1)),
        ("100%", Share(1_000_000)),
    ],
)
def test_an_amount_applies_to_all_containers(text: str, amount: Bytes | Share) -> None:
    vram = an.parse_vram(text)
    assert vram == VramAnnotation(everywhere=amount)
    assert vram.of("any") == amount


def test_amounts_can_be_given_by_container() -> None:
    vram = an.parse_vram("main=8Gi, cache = 25%")
    assert dict(vram.by_container) == {"main": Bytes(8 * GI), "cache": Share(250_000)}
    assert vram.of("main") == Bytes(8 * GI)
    assert vram.of("other") is None


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (an.parse_policy, "spread", ScoringPolicy.SPREAD),
        (an.parse_max_sm, "70%", 700_000),
        (an.parse_processes, "2", 2),
        (an.parse_processes, "1024", 1024),
        (an.parse_device_choice, " gated ", DeviceChoice.GATED),
        (an.parse_reserve, "512Mi", 512 << 20),
        (an.parse_reserve, "0", 0),
    ],
)
def test_other_keys_are_parsed(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


BAD_VRAM = {
    "": "is not valid: it has no digits",
    "8lots": "is not valid: 'lots' is not a unit; units are like Mi, Gi, M and G",
    "8K": "is not valid: 'K' is not a unit; units are like Mi, Gi, M and G",
    "8 Gi": "is not valid: it is not a number followed by a unit",
    "8_000": "is not valid: it is not a number followed by a unit",
    "\u0668Gi": "is not valid: it is not a number followed by a unit",
    "0": "is not more than zero bytes",
    "-8Gi": "is not more than zero bytes",
    "-0.1": "is not more than zero bytes",
    "16385Gi": "is more than any device has",
    "7Ei": "is more than any device has",
    "9Ei": "is not valid: it is too large",
    "0%": "is not a share above 0% and up to 100%",
    "100.0001%": "is not a share above 0% and up to 100%",
    "12.34567%": "is not a share above 0% and up to 100%",
    "-5%": "is not a share above 0% and up to 100%",
    "\u0668%": "is not a share above 0% and up to 100%",
    "=8Gi": "has no valid container name in '=8Gi'",
    "Main=8Gi": "has no valid container name in 'Main=8Gi'",
    "main=8Gi,": "has no valid container name in ''",
    "main=8Gi,4Gi": "has no valid container name in '4Gi'",
    "main=8Gi,main=4Gi": "names container 'main' twice",
    "main=": "is not valid: it has no digits",
    "main=8Gi=4Gi": "is not valid: it is not a number followed by a unit",
}


@pytest.mark.parametrize("text", BAD_VRAM, ids=ascii)
@pytest.mark.parametrize("key", [an.VRAM, an.DEFAULT_VRAM])
def test_an_invalid_amount_is_explained(text: str, key: str) -> None:
    with pytest.raises(BadAnnotation) as caught:
        an.parse_vram(text, key)
    assert caught.value.why == BAD_VRAM[text]
    explains(caught.value, key, text, an.parse_vram)


@pytest.mark.parametrize(
    ("parse", "key", "text"),
    [
        *((an.parse_policy, an.POLICY, text) for text in ("", "Pack", "pack,spread")),
        *((an.parse_max_sm, an.MAX_SM, text) for text in ("", "70", "0%", "101%", "-1%", "0.7")),
        *((an.parse_processes, an.PROCESSES, t) for t in ("", "0", "-1", "1025", "2.0", "\u0662")),
        *((an.parse_device_choice, an.DEVICE_CHOICE, text) for text in ("", "Any", "best")),
        *((an.parse_reserve, an.RESERVE, t) for t in ("", "-0.1", "10%", "1gb", "17Ti", "9Ei")),
        *(
            (an.parse_unified_memory, an.UNIFIED_MEMORY, text)
            for text in ("", "all", "96", "50%", "-1Gi", "17Ti", "Auto")
        ),
        *((an.parse_cordon, an.CORDON, t) for t in ("GPU 1", ",", "a,,b", "-x")),
    ],
)
def test_other_invalid_values_are_explained(
    parse: Callable[[str], Any], key: str, text: str
) -> None:
    with pytest.raises(BadAnnotation) as caught:
        parse(text)
    explains(caught.value, key, text, parse)


def explains(err: BadAnnotation, key: str, text: str, parse: Callable[[str], Any]) -> None:
    """Check that the error names the key and the value, and contains a valid example."""
    assert (err.key, err.value) == (key, text)
    assert f"annotation {key}: {text!r} {err.why}. Example: {key}: " in str(err)
    assert str(err).strip('"').endswith(err.example)
    parse(err.example)


def test_a_long_or_unprintable_value_is_shortened() -> None:
    for text in ("9" * 100_000, "a=1Gi," + "b" * 100_000, "%" * 100_000, "=" * 100_000):
        with pytest.raises(BadAnnotation) as caught:
            an.parse_vram(text)
        assert len(str(caught.value)) < 400


PARSERS: list[Callable[[str], object]] = [
    an.parse_vram,
    an.parse_policy,
    an.parse_max_sm,
    an.parse_processes,
    an.parse_device_choice,
    an.parse_reserve,
    an.parse_gated,
    an.parse_share,
]


@given(st.text() | st.text("0123456789.%,=aGi -", max_size=30) | st.text("0123456789eE+-.KMGTPi"))
@example("9" * 5000)
@example("1e-999999999")
@example("1e999999999")
@example("main=8Gi" + ",a=1Gi" * 3000)
@example("8Gi\u0000")
@example("\u0668Gi")
@example("100.0001%")
def test_any_text_is_parsed_or_explained(text: str) -> None:
    for parse in PARSERS:
        try:
            found = parse(text)
        except BadAnnotation as err:
            assert err.value == text  # noqa: PT017 - most texts are bad, but not all
            assert ". Example: headroom.gpu/" in str(err)  # noqa: PT017
            assert len(str(err)) <= 700  # noqa: PT017
            continue
        if isinstance(found, VramAnnotation):
            amounts = [found.everywhere] if found.everywhere else [*found.by_container.values()]
            for amount in amounts:
                assert is_possible(amount)
            assert an.parse_vram(an.render_vram(found)) == found


def is_possible(amount: Bytes | Share) -> bool:
    if isinstance(amount, Bytes):
        return 0 < amount.count_bytes <= MAX_DEVICE_BYTES
    return 0 < amount.ppm <= PPM


@given(vrams)
def test_a_rendered_annotation_is_parsed_to_the_same_value(vram: VramAnnotation) -> None:
    assert an.parse_vram(an.render_vram(vram)) == vram


@given(amounts)
def test_a_rendered_amount_is_parsed_to_the_same_amount(amount: Bytes | Share) -> None:
    assert an.parse_vram(an.render_amount(amount)).everywhere == amount


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (Bytes(8 * GI), "8Gi"),
        (Bytes(3 * GI // 2), "1536Mi"),
        (Bytes(8 * 10**9), "7812500Ki"),
        (Bytes(1500), "1500"),
        (Share(125_000), "12.5%"),
        (Share(1_000_000), "100%"),
        (Share(1), "0.0001%"),
    ],
)
def test_amounts_are_rendered_in_short_form(amount: Bytes | Share, text: str) -> None:
    assert an.render_amount(amount) == text


def test_cordoned_devices_are_listed_by_uuid() -> None:
    assert an.parse_cordon("") == an.parse_cordon("  ") == frozenset()
    assert an.parse_cordon("GPU-1") == {"GPU-1"}
    assert an.parse_cordon(" GPU-1, MIG-2 ,GPU-1") == {"GPU-1", "MIG-2"}
    assert len(an.parse_cordon(",".join(f"GPU-{i}" for i in range(128)))) == 128
    for too_much in (",".join(f"GPU-{i}" for i in range(129)), "g" * 129):
        with pytest.raises(BadAnnotation, match=r"Example: headroom\.gpu/cordon: GPU-5fd9a1c4-"):
            an.parse_cordon(too_much)


@pytest.mark.parametrize(
    ("written", "example"),
    [
        ("8GB", "8Gi"),
        ("20gb", "20Gi"),
        ("16 GiB", "16Gi"),
        ("8,5Gi", "8.5Gi"),
        ("50 %", "50%"),
        ("Auto", "auto"),
        ("auto default=4Gi", "auto,default=4Gi"),
        ("auto,default=8GB", "auto,default=8Gi"),
        ("main:4Gi", "main=4Gi"),
        ("main=4GB,cache=2gi", "main=4Gi,cache=2Gi"),
        # Without a likely correction, the example is the usual one.
        ("lots", "8Gi"),
        ("120%", "25%"),
        ("x" * 1000, "8Gi"),
    ],
)
def test_the_example_of_an_error_repeats_what_was_written(written: str, example: str) -> None:
    parse = an.parse_auto if an.is_auto(written) else an.parse_vram
    with pytest.raises(BadAnnotation) as caught:
        parse(written)
    assert str(caught.value).endswith(f"Example: headroom.gpu/vram: {example}")
