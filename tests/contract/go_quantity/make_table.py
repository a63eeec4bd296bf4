"""Runs Go's resource.Quantity on many strings and stores the results. See README.md."""

import json
import random
import re
import subprocess
import sys
from decimal import MAX_EMAX, MIN_EMIN, ROUND_UP, Decimal, localcontext
from pathlib import Path

SUFFIXES = ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
NO_SUFFIXES = ["K", "g", "t", "gi", "GI", "mi", "ki", "i", "ii", "Kii", "MG", "B", "GB", "GiB"]
NUMBERS = ["0", "1", "8", "999", "1023", "1024", "0.1", "1.5", ".5", "5.", "007", "0.0009765625"]
SHAPES = [
    *["", "+", "-", ".", "+.", "-.", "Gi", "+Gi", "-Gi", ".Gi", "E", "e1", "E1", ".e5", "e", "i"],
    *["--1", "+-1", "-+1", "1..2", "1.2.3", "..1", "1-", "1+", "1-1", "1,5", "1'000", "1_0", "1 0"],
    *[" 1", "1 ", "1\n", "\n1", "\t1", "1\u0000", "8 Gi", "8Gi ", "8Gi8", "1\u00a0", "\ufeff1"],
    *["\u0661", "\u0967", "\uff11", "1\u0661", "1e\u0661", "\u00b2", "1\u212a", "1\u0131"],
    *["0x1", "0b1", "0o7", "1f", "nan", "NaN", "inf", "Infinity", "-inf", "None", "true", "1/2"],
    *["1e", "1e+", "1e-", "1E+", "1E-", "1e 5", "1e1.5", "1E1.5", "1e1Gi", "1e1e1", "1Ee5", "1eE"],
    *["1e+-5", "1m5", "1Gi5", "1Ei5", "25%", "8Gi,4Gi", "main=8Gi", "$8", "1e1_0", "1e1 "],
    *["1e0", "1e-0", "1e+0", "1e1", "1E1", "1e+1", "1E+1", "1e-1", "1E-1", "1e9", "1E9", "1.5e3"],
    *["1.5E3", "1e00000000001", "1e-00000000001", "00e9", "0e-5", "+1e2", "-1e2", "12e-1", "12e-2"],
    *["1e17", "1e18", "1e19", "9e18", "9.3e18", "1e100", "1e400", "1e999999999", "1e2147483647"],
    *["1e-8", "1e-9", "1e-10", "1e-18", "1e-19", "1e-100", "1e-400", "0e100", "0e999", "0.0e400"],
    *["1e4294967296", "1e4294967297", "1e9223372036854775807", "0e4294967296"],
    *["1e9223372036854775808", "1e-9223372036854775808", "1e-9223372036854775809"],
    *["1e99999999999999999999", "0e99999999999999999999", "1e-99999999999999999999"],
    *["-0", "+0", "00", "-0.0Gi", "-0.1", "-0.00000000001", "-1.000000000001", "-1.5", "-1500m"],
    *["-1.5Gi", "-16.5Gi", "-1Ki", "-1Ti", "-1e18", "-1000000000000000000", "-0.5n", "-0.1Ki"],
    *["1.0000000001", "1.000000000", "0.9999999999", "1.9999999999999999999", "0.0000000001Gi"],
    *["1" * 30, "9" * 64, "9" * 65, "1" * 200, "0" * 63 + "1", "0" * 64 + "1", "1." + "0" * 62],
    *["1." + "0" * 63, "0." + "0" * 61 + "1", "0." + "0" * 62 + "1", "1" + "0" * 62 + "n"],
]
BORDERS = [
    *["9223372036854775806", "9223372036854775807", "9223372036854775808", "9223372036854775809"],
    *["9223372036854775806.1", "9223372036854775806.9999999999", "9223372036854775807.0"],
    *["9223372036854775807.0000000001", "9223372036854775807000m", "9223372036854775807001m"],
    *["9223372036854775807000000n", "9223372036854775.807k", "9223372036854775.808k"],
    *["9.223372036854775807E", "9.223372036854775808E", "9.3E", "9E", "10E", "9223P", "9224P"],
    *["7Ei", "7.5Ei", "7.9Ei", "7.99Ei", "7.9999999999999999999Ei", "8Ei", "9Ei", "8192Pi"],
    *["9007199254740991Ki", "9007199254740992Ki", "9007199254740991.999Ki", "8796093022207Mi"],
    *["8796093022208Mi", "8589934591Gi", "8589934592Gi", "8388608Ti", "18446744073709551616"],
]
MAX_INT64 = (1 << 63) - 1


def texts() -> list[str]:
    rng = random.Random(20250101)
    found = [*SHAPES, *(sign + b for sign in ("", "+", "-") for b in BORDERS)]
    found += [number + suffix for suffix in SUFFIXES for number in NUMBERS]
    found += ["1" + suffix for suffix in NO_SUFFIXES]
    for _ in range(400):
        whole = str(rng.randrange(10 ** rng.randrange(1, 21)))
        part = "." + str(rng.randrange(10**12))[: rng.randrange(13)] if rng.random() < 0.5 else ""
        suffix = rng.choice([*SUFFIXES, *SUFFIXES, f"{rng.choice('eE')}{rng.randrange(-25, 25)}"])
        found.append(rng.choice(["", "", "", "+", "-"]) + whole + part + suffix)
    for _ in range(150):
        found.append("".join(rng.choices("0123456789.+-eEinumkKMGTP", k=rng.randrange(1, 9))))
    return list(dict.fromkeys(found))


def amount_of(answer: dict) -> Decimal:
    """Return the exact amount that Go computed. It is a Decimal because some amounts are huge, such
    as ``1e999999999``.
    """
    return Decimal(answer["unscaled"]).scaleb(-answer["scale"])


def case(answer: dict) -> dict:
    text = answer["text"]
    if "error" in answer:
        return {"text": text, "rejected": True}
    value, amount = answer["value"], amount_of(answer)
    kept = {"text": text, "value": value}
    exponent = re.search(r"[eE]([+-]?[0-9]+)$", text)
    nonzero = re.match(r"[+-]?[0.]*[1-9]", text)
    if not re.match(r"[+-]?[.]?[0-9]", text):
        return kept | {"mark": "no_digits"}
    if len(text) > 64:
        return kept | {"mark": "too_long"}
    if exponent and abs(int(exponent[1])) >= 1 << 31:  # Go keeps the lower 32 bits.
        return kept | ({"mark": "beyond_int64"} if nonzero and int(exponent[1]) > 0 else {})
    capped = text.endswith("i") and abs(amount) == MAX_INT64  # not a whole number of Ki
    if capped or abs(amount) > MAX_INT64:
        return kept | {"mark": "beyond_int64"}
    rounded = int(amount.to_integral_value(ROUND_UP))
    if rounded == value:
        return kept
    assert amount < 0, answer
    return kept | {"mark": "negative", "exact": rounded}


def main(program: str, table: str) -> None:
    lines = "".join(json.dumps(text) + "\n" for text in texts())
    asked = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    with localcontext(prec=200, Emax=MAX_EMAX, Emin=MIN_EMIN):
        cases = [case(json.loads(line)) for line in asked.stdout.splitlines()]
    body = ",\n".join(json.dumps(c) for c in cases)
    Path(table).write_text(f"[\n{body}\n]\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
