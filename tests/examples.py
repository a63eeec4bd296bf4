"""The number of random examples per property.

By default it is a fifth of the given number. With TEST_THOROUGH=1 in the environment, it is the
whole number. With TEST_QUICK=1, which ``make check`` sets, it is a tenth, and already a tenth
reports nearly every change of the product that a larger number reports. Without CI=true, each run
draws different examples. With CI=true, Hypothesis draws the same ones in each run.
"""

import os

THOROUGH = os.environ.get("TEST_THOROUGH") == "1"
QUICK = os.environ.get("TEST_QUICK") == "1"


def examples(thorough: int) -> int:
    if THOROUGH:
        return thorough
    return max(5, thorough // 10) if QUICK else max(5, thorough // 5)
