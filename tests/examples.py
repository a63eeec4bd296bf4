"""The number of random examples per property.

By default it is two fifths of the given number, because each run draws different examples. With
TEST_THOROUGH=1 in the environment, it is the whole number. With TEST_QUICK=1, which ``make check``
sets, it is a tenth.
"""

import os

THOROUGH = os.environ.get("TEST_THOROUGH") == "1"
QUICK = os.environ.get("TEST_QUICK") == "1"


def examples(thorough: int) -> int:
    if THOROUGH:
        return thorough
    return max(5, thorough // 10) if QUICK else 2 * thorough // 5
