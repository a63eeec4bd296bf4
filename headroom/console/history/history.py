"""The last hour of every device and pod: reservation, use and SM activity, compressed.

A node gets a row for each report that changed a value, at most one in ``RESOLUTION_S``. A value
holds until the next row. The node's *layout* defines the columns of a row: three for each device,
and one for each pod on a device. A new layout begins a new *block*. Full blocks are compressed:
each column is stored as differences, most of which are zero.

The memory of all blocks is limited. If they need more, the oldest rows are dropped first.
"""

import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headroom.console.history.holdings import HeldMinutes

#: Minimum time between two rows of a node, in seconds.
RESOLUTION_S = 10
#: Seconds for which rows are kept.
KEPT_S = 3600
#: Unit in which memory is stored. With 16 bits, values reach 512 GiB.
UNIT_BYTES = 8 << 20
#: Unit in which SM activity is stored.
UNIT_RATIO = 0.001
#: The value of a column that was not measured, or whose report is stale.
UNKNOWN = 0xFFFF
#: Columns of a device: memory reserved for pods, memory in use, SM activity.
RESERVED, USED, SM = range(3)
DEVICE_COLUMNS = 3
#: Maximum bytes of all blocks together, including the objects that hold them.
MAX_BYTES = 120 << 20
#: Number of rows after which a block is compressed. This takes ten minutes or more.
BLOCK_ROWS = 60
#: Bytes that the objects of a block and of a node take in addition to its rows.
_BLOCK_BYTES = 400
_POD_BYTES = 120
#: Number of steps that are dropped at a time when memory is short.
_SHORTER_STEPS = 30

Values = NDArray[np.uint16]
Steps = NDArray[np.uint32]


class PodOn(msgspec.Struct, frozen=True, gc=False):
    """A pod on a device. ``slot`` is the position of the device in the layout."""

    slot: int
    uid: str
    namespace: str
    name: str
    #: The pod's request in bytes. None if the pod has no reservation.
    requested_bytes: int | None = None


class Layout(msgspec.Struct, frozen=True, gc=False):
    """The columns of a block: ``DEVICE_COLUMNS`` for each device, then one for each pod."""

    #: UUIDs of the pod's devices.
    devices: tuple[str, ...] = ()
    pods: tuple[PodOn, ...] = ()

    @property
    def width(self) -> int:
        return DEVICE_COLUMNS * len(self.devices) + len(self.pods)


class Block(msgspec.Struct, frozen=True, gc=False):
    """Compressed rows of one node. A step is a multiple of ``RESOLUTION_S`` of Unix time."""

    layout: Layout
    first_step: int
    last_step: int
    packed: bytes

    def rows(self) -> tuple[Steps, Values]:
        """Return the steps, and a row of values for each step. Raise ``ValueError`` if ``pack`` did
        not make the block."""
        width = self.layout.width
        try:
            raw = np.frombuffer(zlib.decompress(self.packed), np.uint8)
        except zlib.error as err:
            raise ValueError(f"a block of the history cannot be decompressed: {err}") from err
        count, left = divmod(len(raw), 2 * (width + 1))
        if left or not count:
            raise ValueError(f"a block of the history does not have {width} columns")
        halves = raw.astype(np.uint16).reshape(2, width + 1, count)
        folded = halves[0] | halves[1] << 8
        differences = folded >> 1 ^ -(folded & 1)
        table = np.cumsum(differences, axis=1, dtype=np.uint16)
        return table[0].astype(np.uint32) + np.uint32(self.first_step), table[1:].T


def pack(layout: Layout, steps: Sequence[int], rows: bytes | bytearray) -> Block:
    """Return a block of these rows. Each row in ``rows`` has ``layout.width`` little-endian
    words."""
    table = np.empty((layout.width + 1, len(steps)), np.uint16)
    table[0] = np.asarray(steps, np.int64) - steps[0]
    table[1:] = np.frombuffer(rows, "<u2").reshape(len(steps), layout.width).T
    differences = np.diff(table, axis=1, prepend=np.uint16(0)).view(np.int16)
    # Map small differences of either sign to small numbers, and put all high bytes at the end. Most
    # high bytes are 0, which compresses well.
    folded = (differences << 1 ^ differences >> 15).view(np.uint16)
    packed = zlib.compress(
        (folded & 0xFF).astype(np.uint8).tobytes() + (folded >> 8).astype(np.uint8).tobytes(), 1
    )
    return Block(layout, steps[0], steps[-1], packed)


def _holding(steps: Steps, values: Values, step: int) -> tuple[Steps, Values]:
    """Return the row that holds at ``step``, and all later rows."""
    begin = max(0, int(np.searchsorted(steps, step, "right")) - 1)
    return steps[begin:], values[begin:]


class _NodeRows:
    """The rows of one node: compressed blocks, oldest first, then the open block."""

    __slots__ = ("blocks", "layout", "rows", "steps")

    def __init__(self) -> None:
        self.layout = Layout()
        self.steps = array("I")
        self.rows = bytearray()
        self.blocks: deque[Block] = deque()

    def add(self, step: int, layout: Layout, row: bytes) -> None:
        if self.steps and step <= self.steps[-1]:
            self._drop_last()  # only the newest report of a step counts
        if layout != self.layout or len(self.steps) >= BLOCK_ROWS:
            self.close()
            self.layout = layout
        elif self.rows.endswith(row) and self.rows:
            return
        self.steps.append(step)
        self.rows += row

    def _drop_last(self) -> None:
        del self.steps[-1]
        del self.rows[len(self.rows) - 2 * self.layout.width :]

    def close(self) -> None:
        """Compress the open block."""
        if self.steps:
            self.blocks.append(pack(self.layout, self.steps, self.rows))
            self.steps, self.rows = array("I"), bytearray()

    def since(self, step: int) -> Iterator[tuple[Layout, Steps, Values]]:
        """Yield layout, steps and values of the rows that hold at ``step`` or later."""
        begins = [*(each.first_step for each in self.blocks), *self.steps[:1]]
        for number, block in enumerate(self.blocks, 1):
            if number == len(begins) or begins[number] > step:
                yield block.layout, *_holding(*block.rows(), step)
        if self.steps:
            steps = np.array(self.steps, np.uint32)
            values = np.frombuffer(bytes(self.rows), "<u2").reshape(len(steps), self.layout.width)
            yield self.layout, *_holding(steps, values, step)

    def at(self, step: int) -> tuple[Layout, Sequence[int]] | None:
        """Return the layout and the row that holds at ``step``, or None if all rows are later."""
        if number := bisect_right(self.steps, step):
            size = 2 * self.layout.width
            return self.layout, array("H", bytes(self.rows[(number - 1) * size : number * size]))
        for block in reversed(self.blocks):
            if block.first_step <= step:
                _, values = _holding(*block.rows(), step)
                return block.layout, values[0].tolist()
        return None

    def forget_before(self, step: int) -> None:
        """Drop blocks whose last row was replaced before ``step``."""
        while self.blocks:
            begins = [each.first_step for each in list(self.blocks)[1:2]] or list(self.steps[:1])
            if not begins or begins[0] > step:
                return
            self.blocks.popleft()

    @property
    def size_bytes(self) -> int:
        packed = sum(len(each.packed) + _BLOCK_BYTES for each in self.blocks)
        return packed + len(self.rows) + _BLOCK_BYTES + _POD_BYTES * len(self.layout.pods)


class Totals(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sums over the fleet at one step."""

    step: int
    allocatable_bytes: int
    reserved_bytes: int
    used_bytes: int
    unattributed_bytes: int
    headroom_bytes: int
    overcommitted_devices: int
    pending_pods: int


class History:
    """The rows of all nodes. Call its methods only from the thread that adds rows."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._nodes: dict[str, _NodeRows] = {}
        self._totals: deque[Totals] = deque(maxlen=KEPT_S // RESOLUTION_S)
        #: GPUs and memory that namespaces held, by minute.
        self.held = HeldMinutes()
        #: Values before this step are not kept.
        self.first_step = 0

    def add(self, node: str, step: int, layout: Layout, values: Sequence[int]) -> None:
        """Add the values of a node at a step. They have the order of the layout."""
        rows = self._nodes.get(node)
        if rows is None:
            rows = self._nodes[node] = _NodeRows()
        if layout == rows.layout:
            layout = rows.layout
        rows.add(step, layout, array("H", values).tobytes())

    def add_totals(self, totals: Totals) -> None:
        if self._totals and self._totals[-1].step >= totals.step:
            self._totals.pop()
        self._totals.append(totals)

    def nodes(self) -> list[str]:
        return list(self._nodes)

    def totals(self) -> list[Totals]:
        return list(self._totals)

    def since(self, node: str, step: int) -> list[tuple[Layout, Steps, Values]]:
        """Return layout, steps and values of the node's rows that hold at ``step`` or later, one
        tuple for each block. The first row may be older than ``step`` if it still holds then."""
        rows = self._nodes.get(node)
        return list(rows.since(step)) if rows else []

    def at(self, node: str, step: int) -> tuple[Layout, Sequence[int]] | None:
        """Return the layout of a node and the row that holds at ``step``, or None."""
        rows = self._nodes.get(node)
        return rows.at(step) if rows else None

    def first_step_of(self, node: str) -> int:
        """Return the step of the node's first row; 0 if it has none."""
        rows = self._nodes.get(node)
        if rows is None:
            return 0
        return rows.blocks[0].first_step if rows.blocks else rows.steps[0] if rows.steps else 0

    def last_step(self, node: str) -> int:
        """Return the step of the node's last row; 0 if it has none."""
        rows = self._nodes.get(node)
        if rows is None:
            return 0
        return rows.steps[-1] if rows.steps else rows.blocks[-1].last_step if rows.blocks else 0

    def layout(self, node: str) -> Layout | None:
        """Return the newest layout of a node, or None if it has no rows."""
        rows = self._nodes.get(node)
        return rows.layout if rows else None

    def forget(self, step: int) -> None:
        """Drop rows that are older than ``KEPT_S`` at ``step``, and more rows if memory is
        short."""
        self.first_step = max(self.first_step, step - KEPT_S // RESOLUTION_S)
        self._forget_before(self.first_step)
        while self.size_bytes > self._max_bytes and self.first_step < step:
            self.first_step = min(step, self.first_step + _SHORTER_STEPS)
            self._forget_before(self.first_step)

    def _forget_before(self, step: int) -> None:
        for name, rows in list(self._nodes.items()):
            rows.forget_before(step)
            if self.last_step(name) < step and not rows.layout.devices:
                del self._nodes[name]

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all blocks, including the objects that hold them."""
        return sum(rows.size_bytes for rows in self._nodes.values())
