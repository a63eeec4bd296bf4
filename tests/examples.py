"""The number of random examples per property.

By default a fifth of the given number, because each run draws different examples, and most faults
fail at one of the first few. If CI is true: two fifths. With TEST_THOROUGH=1 in the environment:
all. With TEST_QUICK=1, which ``make check`` sets: a tenth.
"""

import os

THOROUGH = os.environ.get("TEST_THOROUGH") == "1"
QUICK = os.environ.get("TEST_QUICK") == "1"
CI = os.environ.get("CI") == "true"


def examples(thorough: int) -> int:
    if THOROUGH:
        return thorough
    if QUICK:
        return max(5, thorough // 10)
    return (2 if CI else 1) * thorough // 5
