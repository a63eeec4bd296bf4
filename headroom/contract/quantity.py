"""Parses Kubernetes quantities into whole bytes, as Kubernetes does, and formats them.

The grammar and the rounding are the same as in ``resource.Quantity`` and its ``Value()`` in
k8s.io/apimachinery. All numbers are integers. This module differs in cases in which Kubernetes
computes a wrong result:

* Kubernetes wraps or caps amounts above int64. This module rejects them.
* Kubernetes reads text without a digit (``Gi``, ``-``, ``.``) as zero, against its own grammar.
  This module rejects it.
* For many negative amounts, ``Value()`` is wrong and even positive. Here they are exact.
* For ``1e-999999999``, Kubernetes does not return. This module limits the exponent and the length.
"""

import re

from headroom.contract.errors import BadQuantity

#: Maximum length of a quantity. Longer texts are rejected, although Kubernetes accepts them. 2**63
#: nanobytes have 28 digits.
MAX_LENGTH = 64
MAX_INT64 = (1 << 63) - 1
#: More memory than any device has. A larger value is a mistake, and the limit keeps sums in int64.
MAX_DEVICE_BYTES = 1 << 44
#: A smaller amount of GPU memory is a number without its unit.
MIN_PLAUSIBLE_BYTES = 1 << 20
#: A program that uses a GPU needs more than this for its CUDA context alone.
MIN_CONTEXT_BYTES = 64 << 20

_SHAPE = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?([a-zA-Z]*|[eE][+-]?[0-9]+)")
#: Power of ten of each suffix. ``E`` alone is exa, and ``E`` followed by digits is an exponent.
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
#: Power of two of each suffix, largest first.
_BINARY = {"Ei": 60, "Pi": 50, "Ti": 40, "Gi": 30, "Mi": 20, "Ki": 10}


def parse_bytes(text: str) -> int:
    """Parse a quantity into whole bytes. The result may be negative.

    Rounds fractions of a byte away from zero, so that only zero becomes zero. Raises
    ``BadQuantity`` for text that Kubernetes rejects, and in the cases listed in the module's
    docstring.
    """
    if len(text) > MAX_LENGTH:
        raise BadQuantity(text, f"it is longer than {MAX_LENGTH} characters")
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise BadQuantity(text, "it is not a number followed by a unit")
    sign, whole, decimals, suffix = match.groups(default="")
    if not whole + decimals:
        raise BadQuantity(text, "it has no digits")
    magnitude = int(whole + decimals) << _BINARY.get(suffix, 0)
    exponent = _exponent(text, suffix) - len(decimals)
    # One of the two powers of ten is 1. Floor division of the negated magnitude rounds up.
    magnitude = -(-magnitude * _power_of_ten(exponent) // _power_of_ten(-exponent))
    if magnitude > MAX_INT64:
        raise BadQuantity(text, "it is too large")
    return -magnitude if sign == "-" else magnitude


def _exponent(text: str, suffix: str) -> int:
    """Return the power of ten of ``suffix``. A huge exponent is clamped, because that does not
    change the result."""
    if suffix in _BINARY:
        return 0
    if suffix in _DECIMAL:
        return _DECIMAL[suffix]
    if not suffix[-1].isdigit():
        raise BadQuantity(text, f"{suffix!r} is not a unit; units are like Mi, Gi, M and G")
    exponent = int(suffix[1:])
    if not -MAX_INT64 - 1 <= exponent <= MAX_INT64:
        raise BadQuantity(text, "its exponent is too large")
    # At most MAX_LENGTH digits precede the exponent. So with an exponent of twice this length, any
    # amount is above int64, and with the negative exponent it is below one byte.
    return max(-2 * MAX_LENGTH, min(2 * MAX_LENGTH, exponent))


def _power_of_ten(exponent: int) -> int:
    """Return ten to the power of ``exponent``, or 1 if the exponent is negative."""
    return int(10 ** max(0, exponent))


def format_bytes(count: int) -> str:
    """Format bytes with the largest exact binary unit (``8Gi``), or without a unit if none is exact
    (``1500``)."""
    for suffix, shift in _BINARY.items():
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{suffix}"
    return str(count)


def quantity_up_to(most_bytes: int) -> str:
    """Return the largest easily readable quantity that is at most ``most_bytes`` (``79.5Gi``).

    The result is a multiple of 0.1 Gi, or of 1 Mi below 0.1 Gi. Amounts below 1 Mi become ``0Mi``.
    """
    tenths = most_bytes * 10 >> 30
    if not tenths:
        return f"{most_bytes >> 20}Mi"
    return f"{tenths // 10}.{tenths % 10}Gi" if tenths % 10 else f"{tenths // 10}Gi"


def implausible(count_bytes: int) -> str:
    """Return why an amount of GPU memory is a mistake, or an empty string if it is plausible or
    0."""
    if not 0 < count_bytes < MIN_PLAUSIBLE_BYTES:
        return ""
    amount = "1 byte" if count_bytes == 1 else f"{count_bytes:,} bytes"
    return f"is only {amount}; the unit is probably missing"


def below_context(count_bytes: int) -> str:
    """Return why an amount is less than a program with a CUDA context needs, or an empty string if
    it is 0 or large enough."""
    if not 0 < count_bytes < MIN_CONTEXT_BYTES:
        return ""
    return implausible(count_bytes) or "is less than a CUDA context needs"


def for_people(amount: str) -> str:
    """Return a requested amount with a unit. A plain number of bytes is converted to GiB. Other
    texts stay unchanged."""
    if not amount.isdecimal():
        return amount
    count_bytes = int(amount)
    return gib(count_bytes) if gib(count_bytes) != gib(0) else f"{count_bytes:,} bytes"


def gib(count_bytes: int, up: bool = False) -> str:
    """Format bytes for users, such as ``7.5 GiB``, ``1,440.0 GiB`` or ``-0.1 GiB``.

    Rounds down, or up if ``up`` is set.
    """
    tenths = -(-count_bytes * 10 >> 30) if up else count_bytes * 10 >> 30
    whole, tenth = divmod(abs(tenths), 10)
    return f"{'-' if tenths < 0 else ''}{whole:,}.{tenth} GiB"
