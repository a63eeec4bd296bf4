"""Runs a part of Headroom that keeps what it should forget, to show that the judge notices.

    python -m tests.soak.altered MUTANT MODULE [arguments of the module]

Each mutant changes one public name. It raises an exception if the product does not have the name.
"""

import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_kept: list[object] = []


def _keeps(of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which also keeps its arguments for ever."""

    def keeping(*args: Any, **named: Any) -> Any:
        _kept.append((args, named))
        return of(*args, **named)

    return keeping


#: Part -> module, class (or none), name, and what replaces it.
MUTANTS: dict[str, tuple[str, str, str, Callable[[Any], Any]]] = {
    # The entries of the journal.
    "extender": ("extender.state.journal", "Journal", "record", _keeps),
    # The names of all nodes at each decision.
    "console": ("extender.state.journal", "", "MAX_NODE_SETS", lambda _: sys.maxsize),
    # What each user sent.
    "webhook": ("extender.admission.mutation", "", "mutate", _keeps),
    # The rows of pods that have ended.
    "agent": ("agent.http_endpoints", "LatestSample", "set", _keeps),
}


def main() -> None:
    mutant, module, *arguments = sys.argv[1:]
    where, of, name, change = MUTANTS[mutant]
    holder = import_module(where)
    holder = getattr(holder, of) if of else holder
    setattr(holder, name, change(getattr(holder, name)))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
