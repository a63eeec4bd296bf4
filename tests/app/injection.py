"""Raises exceptions in coroutines of a replica during a simulated life of a cluster.

``python -m tests.app.injection CALL...`` runs the life of a cluster once to find the product's
coroutines that it calls. Then it runs the life once for every ``TOGETHER`` coroutines, which all
raise at this call. A coroutine gets its own life if it was not reached in that life, or if fewer
failures were counted than coroutines raised. Prints a line of JSON for each life, with the reached
coroutines, the missing steps, and the number of counted failures.
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

#: Folders of the product.
PRODUCT = tuple(f"{ROOT / each}/" for each in ("extender", "headroom"))
#: The module that restarts loops after an exception.
RESTARTS = str(ROOT / "headroom/runtime/loops.py")
#: The first instruction of each coroutine after its creation.
RESUME = bytes([opcode.opmap["RESUME"], 0])
#: Every life spends half of its time waiting.
PROCESSES = 2
#: Coroutines that raise in one life.
TOGETHER = 4


class Injected(Exception):
    """An exception that no code expects."""


class Calls:
    """Counts the product's awaited coroutines. Coroutines in ``raising`` raise at their ``call``-th
    call instead of running.

    The first coroutine of a task is not counted, because it handles the exceptions of the others.
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
            return  # The coroutine continues after an await, so this is not a new call.
        name = f"{code.co_filename.removeprefix(f'{ROOT}/')} {code.co_qualname}"
        self.counted[name] += 1
        if name in self._raising and self.counted[name] == self._call:
            # Python removes a profile function that raises.
            asyncio.get_running_loop().call_soon(sys.setprofile, self)
            raise Injected(name)


def played(raising: Sequence[str], call: int) -> tuple[Told, Counter[str]]:
    calls = Calls(raising, call)
    sys.setprofile(calls)
    try:
        return live(), calls.counted
    except Injected:
        # The process does not start, and its parent gets the error.
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
    # The processes share the loaded objects, and do not collect them.
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
