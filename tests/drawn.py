"""Strategies of hypothesis for use inside draws.

Building a strategy takes longer than drawing from it, so each strategy is built once.
"""

import functools
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


@functools.lru_cache(maxsize=None, typed=True)
def one(*values: Any) -> SearchStrategy[Any]:
    """Return the strategy that draws one of the values."""
    return st.sampled_from(values)
