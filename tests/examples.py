"""The number of random examples per property.

By default two fifths of the given number, because each run draws different examples. With
TEST_THOROUGH=1 in the environment: all.
"""

import os

THOROUGH = os.environ.get("TEST_THOROUGH") == "1"


def examples(thorough: int) -> int:
    return thorough if THOROUGH else 2 * thorough // 5
