"""Tests the turns of clients, which determine the order of their requests."""

import asyncio
from collections.abc import Iterable

import pytest

from headroom.runtime.server.turns import Turns

A, B = "192.0.2.1", "192.0.2.2"


async def order(requests: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the requests in the order of their turns, as "address keys number"."""
    turns, served = Turns(), list[str]()

    async def request(keys: tuple[str, ...], number: int) -> None:
        async with turns.turn(*keys):
            address, *others = keys
            served.append("".join([address[-1], *others, str(number)]))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(request(who, n)) for n, who in enumerate(requests)]
    await asyncio.gather(*tasks)
    return served


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        pytest.param([(A, "x")] * 3, ["1x0", "1x1", "1x2"], id="requests of one client in order"),
        pytest.param(
            [*[(A, "x")] * 4, (A, "y")], ["1x0", "1x1", "1y4", "1x2", "1x3"], id="another user"
        ),
        pytest.param(
            [*[(A, "x")] * 4, (B, "x")], ["1x0", "1x1", "2x4", "1x2", "1x3"], id="another address"
        ),
        pytest.param(
            [*((A, f"u{n}") for n in range(4)), (B, "y"), (B, "y")],
            ["1u00", "1u11", "2y4", "1u22", "2y5", "1u33"],
            id="many users of one address have one share",
        ),
        pytest.param(
            [*((A, "a", f"u{n}") for n in range(3)), (A, "b", "x"), (A, "b", "x")],
            ["1au00", "1au11", "1bx3", "1au22", "1bx4"],
            id="many users in one namespace have one share",
        ),
        pytest.param(
            [(A, "a", "u"), (A, "a", "u"), (A, "a", "u"), (A, "a", "v")],
            ["1au0", "1au1", "1av3", "1au2"],
            id="another user in the same namespace",
        ),
    ],
)
def test_clients_take_turns(requests: list[tuple[str, str]], expected: list[str]) -> None:
    assert asyncio.run(order(requests)) == expected


def test_a_client_that_disconnects_or_fails_blocks_no_other_client() -> None:
    async def run() -> list[str]:
        turns, served = Turns(), list[str]()

        async def request(name: str) -> None:
            async with turns.turn(A, name):
                served.append(name)
                await asyncio.sleep(0)
                if name == "fails":
                    raise ValueError

        tasks = [asyncio.create_task(request(name)) for name in ("fails", "leaves", "last")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn(B, "x"):
            served.append("later")
        return served

    assert asyncio.run(run()) == ["fails", "last", "later"]


def test_a_client_that_disconnects_at_its_turn_passes_the_turn_on() -> None:
    async def run() -> list[str]:
        turns, served = Turns(), list[str]()

        async def request(name: str) -> None:
            async with turns.turn(A, name):
                served.append(name)

        async with turns.turn(A, "first"):
            waiting = [asyncio.create_task(request(name)) for name in ("leaves", "last")]
            await asyncio.sleep(0)
        # The turn is granted, but its task has not run yet.
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return served

    assert asyncio.run(run()) == ["last"]
