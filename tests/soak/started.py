"""Runs a component of Headroom for the soak test, optionally with a mutant that keeps too much
data.

    python -m tests.soak.started MUTANT MODULE [arguments of the module]

A full garbage collection runs every few seconds instead of once per hour, because a simulated hour
takes only a minute. MUTANT is ``none`` or a key of ``MUTANTS``. A mutant replaces one public name
and shows that the check detects growth. Starting a mutant raises an exception if the product does
not have the name.
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
    """Wrap the function so that its arguments are kept forever."""

    def keeping(*args: Any, **named: Any) -> Any:
        _kept.append((args, named))
        return of(*args, **named)

    return keeping


#: For each component, the module, the class or an empty string, the name, and a function that
#: returns the replacement.
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
