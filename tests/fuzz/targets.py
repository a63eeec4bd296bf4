"""Lists every target by name with its share of the inputs, which is larger for riskier targets.

Files that the operator writes (settings, manifests for ``convert``) are not hostile. Reviews, the
exporter and the plugin's configuration have property tests next to their modules.
"""

from collections.abc import Callable
from functools import partial

from tests.fuzz.readers import READERS, Reader
from tests.fuzz.samples import OBJECTS
from tests.fuzz.verbs import ForgedTarget, VerbTarget
from tests.fuzz.watch import WatchTarget
from tests.fuzz.watchdog import Target

TARGETS: dict[str, tuple[int, Callable[[], Target]]] = {
    "filter": (50, partial(VerbTarget, "filter")),
    "prioritize": (40, partial(VerbTarget, "prioritize")),
    "bind": (30, partial(VerbTarget, "bind")),
    "preempt": (30, partial(VerbTarget, "preempt")),
    "forged": (3, ForgedTarget),
    **{f"watch-{kind}": (30, partial(WatchTarget, kind, listed=False)) for kind in OBJECTS},
    **{f"list-{kind}": (3, partial(WatchTarget, kind, listed=True)) for kind in OBJECTS},
    **{name: (share, partial(Reader, name, *how)) for name, (share, *how) in READERS.items()},
}
