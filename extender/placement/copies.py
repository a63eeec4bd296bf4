"""Read-only copies of one growing array: a new one costs the rows that changed, not all of them.

A copy that nobody has any more is brought up to date and handed out again; as long as anybody has
it, or any view of it, it stays as it is.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

#: What ``sys.getrefcount`` says of an array that is ours alone: the copy has it, and the call.
_OURS_ALONE = 2
#: Readers of older snapshots keep theirs; for more of them at once everything is copied.
_MOST_KEPT = 3
#: Beyond such a share of the rows a whole copy is quicker.
_FEW = 1 / 100


@dataclass(slots=True, eq=False)
class _Copy:
    array: NDArray[Any]
    #: Rows that were written since.
    behind: set[int] = field(default_factory=set)


class Copies:
    """Copies of one array, whose owner says which rows it writes."""

    def __init__(self) -> None:
        #: The one handed out last comes last.
        self._kept: list[_Copy] = []

    def wrote(self, row: int) -> None:
        for copy in self._kept:
            copy.behind.add(row)

    def newest(self, now: NDArray[Any]) -> NDArray[Any]:
        """The array as it is: the copy handed out last as long as it is the same."""
        self._kept = [copy for copy in self._kept if copy.array.shape == now.shape]
        if self._kept and not self._kept[-1].behind:
            return self._kept[-1].array
        for place, copy in enumerate(self._kept):
            few = len(copy.behind) <= _FEW * len(now)
            if few and sys.getrefcount(copy.array) == _OURS_ALONE:
                self._kept.append(self._kept.pop(place))
                copy.array.flags.writeable = True
                for row in copy.behind:
                    copy.array[row] = now[row]
                copy.array.flags.writeable = False
                copy.behind.clear()
                return copy.array
        whole = now.copy(order="K")
        whole.flags.writeable = False
        self._kept = [*self._kept[1 - _MOST_KEPT :], _Copy(whole)]
        return whole
