"""Every target by name, and its share of the inputs: more where more can go wrong."""

from collections.abc import Callable
from functools import partial

from tests.fuzz import node, texts
from tests.fuzz.verbs import ForgedTarget, VerbTarget
from tests.fuzz.watch import KINDS, WatchTarget
from tests.fuzz.watchdog import Target

_TARGETS: dict[str, tuple[int, Callable[[], Target]]] = {
    "filter": (50, partial(VerbTarget, "filter")),
    "prioritize": (40, partial(VerbTarget, "prioritize")),
    "bind": (30, partial(VerbTarget, "bind")),
    "preempt": (30, partial(VerbTarget, "preempt")),
    "forged": (3, ForgedTarget),
    **{f"watch-{kind}": (30, partial(WatchTarget, kind, listed=False)) for kind in KINDS},
    **node.targets(),
    **texts.targets(),
    **{f"list-{kind}": (3, partial(WatchTarget, kind, listed=True)) for kind in KINDS},
}
SHARES = {name: share for name, (share, _) in _TARGETS.items()}


def made(name: str) -> Target:
    return _TARGETS[name][1]()
