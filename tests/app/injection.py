"""Raises exceptions in the coroutines of a replica during a simulated life of a cluster.

``python -m tests.app.injection CALL...`` runs the life of a cluster once to find the product's
coroutines that it calls. Then it runs one life for each group of ``TOGETHER`` coroutines, which all
raise at call number CALL. If a life did not reach a coroutine, or counted fewer failures than
raising coroutines, each coroutine of the group gets its own life. Prints a line of JSON for each
life, with the reached coroutines, the missing steps, and the number of counted failures.
"""

import asyncio
import gc
import inspect
import json
import logging
import multiprocessing
import opcode
import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tests.app.life import live
from tests.app.life_world import Told, quicken
from tests.controlplane import ROOT

#: Folders with the product's code.
PRODUCT = tuple(f"{ROOT / each}/" for each in ("extender", "headroom"))
#: The module that restarts a loop after an exception.
RESTARTS = str(ROOT / "headroom/runtime/loops.py")
#: The first instruction that each coroutine runs.
RESUME = bytes([opcode.opmap["RESUME"], 0])
#: Number of lives that run at the same time, because every life waits half of its time.
PROCESSES = 2
#: Number of coroutines that raise in one life.
TOGETHER = 8


class Injected(Exception):
    """An exception that no code expects."""


class Calls:
    """Counts the calls of the product's coroutines. Coroutines in ``raising`` raise an exception at
    call number ``call``.

    The outermost coroutine of a task is not counted, because it handles the exceptions of the other
    coroutines.
    """

    def __init__(self, raising: Sequence[str], call: int) -> None:
        self.counted = Counter[str]()
        self._raising, self._call = frozenset(raising), call

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_flags & inspect.CO_COROUTINE:
            return
        if caller is None or not caller.f_code.co_flags & inspect.CO_COROUTINE:
            return
        if not code.co_filename.startswith(PRODUCT) or code.co_filename == RESTARTS:
            return
        if frame.f_lasti > code.co_code.find(RESUME):
            return  # This is not a new call, because the coroutine continues after an await.
        name = f"{code.co_filename.removeprefix(f'{ROOT}/')} {code.co_qualname}"
        self.counted[name] += 1
        if name in self._raising and self.counted[name] == self._call:
            # Python removes a profile function that raises, so set it again.
            asyncio.get_running_loop().call_soon(sys.setprofile, self)
            raise Injected(name)


def played(raising: Sequence[str], call: int) -> tuple[Told, Counter[str]]:
    calls = Calls(raising, call)
    sys.setprofile(calls)
    try:
        return live(), calls.counted
    except Injected:
        # The replica does not start, and its parent process gets the error.
        return Told(failures=1), calls.counted
    finally:
        sys.setprofile(None)


def life(raising: Sequence[str], call: int) -> dict[str, Any]:
    told, counted = played(raising, call)
    reached = [name for name in raising if counted[name] >= call]
    is_counted = told.failures >= len(reached)
    return {
        "raising": raising,
        "reached": reached,
        "again": [name for name in raising if name not in reached] if is_counted else raising,
        "missing": told.missing,
        "failures": told.failures,
    }


def main(calls: Sequence[int]) -> None:
    quicken()
    logging.disable()
    # The processes share the loaded objects, so exclude them from garbage collection.
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(PROCESSES) as processes:
        told, counted = processes.apply(played, ((), 1))
        assert not told.missing, told
        for call in calls:
            names = sorted(name for name, count in counted.items() if count >= call)
            lives = -(-len(names) // TOGETHER)
            shown = processes.starmap(life, [(names[i::lives], call) for i in range(lives)], 1)
            alone = [([name], call) for each in shown for name in each["again"]]
            for each in (*shown, *processes.starmap(life, alone, 1)):
                print(json.dumps(each))  # noqa: T201


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
