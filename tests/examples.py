"""How many random examples a property is tried with: two fifths of what is named, as each run draws
others; with TEST_THOROUGH=1 in the environment all."""

import os

THOROUGH = os.environ.get("TEST_THOROUGH") == "1"


def examples(thorough: int) -> int:
    return thorough if THOROUGH else 2 * thorough // 5
