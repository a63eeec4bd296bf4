"""Lists every target by name with its share of the inputs. Riskier targets have a larger share.

Files that the operator writes, such as settings and manifests for ``convert``, are trusted. Other
property tests cover reviews, the exporter and the plugin's configuration.
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
