"""Checks that the memory of a sent response is freed without the garbage collector."""

import gc
import inspect

import pytest

from tests.console.asking import Asked
from tests.waiting import until


def being_made() -> list[str]:
    """Return the console's generators that were created since the garbage collector was
    disabled.
    """
    return [
        each.gi_code.co_name
        for each in gc.get_objects(generation=0)
        if inspect.isgenerator(each) and "headroom/console" in each.gi_code.co_filename
    ]


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/fleet", "/v1/snapshot", "/v1/pending"])
def test_a_sent_response_is_freed_without_the_collector(path: str) -> None:
    asked = Asked()
    asked.add_node("a")
    gc.disable()
    try:
        assert asked.get(path).status_code == 200
        # Wait, because the thread that built the last part releases it later.
        until(lambda: being_made() == [], "all that made it is freed")
    finally:
        gc.enable()
