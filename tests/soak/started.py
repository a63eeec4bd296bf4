"""Runs a component of Headroom in a shortened day, optionally with a mutant that keeps too much.

    python -m tests.soak.started MUTANT MODULE [arguments of the module]

Garbage in cycles is collected every few seconds, because a component collects it once an hour.
MUTANT is ``none`` or a key of ``MUTANTS``: a change of one public name, which shows that the judge
works. A change raises an exception if the product does not have the name.
"""

import functools
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from headroom.runtime import memory_policy

COLLECTED_EVERY_S = 4.0
_kept: list[object] = []


def _keeps(of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a wrapper that keeps its arguments forever."""

    def keeping(*args: Any, **named: Any) -> Any:
        _kept.append((args, named))
        return of(*args, **named)

    return keeping


#: Module, class (or none), name and replacement for each component.
MUTANTS: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    # Keeps the entries of the journal.
    "extender": ("headroom.core.journal.journal", "Journal", "record", _keeps),
    # Keeps the names of all nodes at each decision.
    "console": ("headroom.core.journal.journal", "", "MAX_NODE_SETS", lambda _: sys.maxsize),
    # Keeps the pods that users sent.
    "webhook": ("headroom.webhook.mutation", "", "mutate", _keeps),
    # Keeps the samples, with the rows of ended pods.
    "agent": ("agent.http_endpoints", "LatestSample", "set", _keeps),
}


def main() -> None:
    mutant, module, *arguments = sys.argv[1:]
    collect = functools.partial(memory_policy.collect_garbage, COLLECTED_EVERY_S)
    memory_policy.collect_garbage = collect  # type: ignore[assignment]
    if mutant != "none":
        where, of, name, change = MUTANTS[mutant]
        holder = import_module(where)
        holder = getattr(holder, of) if of else holder
        setattr(holder, name, change(getattr(holder, name)))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
