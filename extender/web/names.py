"""Node names as they stand in a body, and the rows that they mean.

kube-scheduler sends thousands of names with every call, each time in another order. To make a
string of each, and to look each up, takes longer than to weigh all nodes. So they stay the bytes
that came, eight bytes to a word, and are compared with the known names all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from extender.placement.snapshot import Rows, Snapshot

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(str).decode
_QUOTE = ord('"')
_WORD_BYTES = 8
#: The i-th keeps the first i bytes of a word, as it lies in memory.
_FIRST_BYTES = np.array([(1 << 8 * i) - 1 for i in range(_WORD_BYTES + 1)], "<u8")
_HALF = np.uint64(32)
#: 2**64 divided by the golden ratio.
_ODD = np.uint64(0x9E3779B97F4A7C15)
#: Tables, and places in each of them for a known name: one in ten meets another in the first, one
#: in a thousand in two, and small tables stay in the processor's cache.
_TABLES, _SPARSE = 3, 4
#: Names that are sooner copied one by one than picked from all.
_FEW = 200

#: (words, names), or (names,).
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A JSON list of strings, and where each of them begins and ends, quotes not included.

    No two names lie in one place; a name is written as msgspec writes it.
    """

    json: bytes
    starts: Rows
    ends: Rows

    @classmethod
    def plain(cls, json: bytes) -> "Names | None":
        """A valid JSON value as it came; None where it is no list of strings with nothing between
        them but commas, or where a name holds what JSON can write in more than one way."""
        if json == b"[]":
            return cls.of([])
        if not (json.startswith(b'["') and json.endswith(b'"]') and json.isascii()):
            return None
        if b"\\" in json:
            return None
        quotes = np.flatnonzero(np.frombuffer(json, np.uint8) == _QUOTE)
        starts, ends = quotes[::2] + 1, quotes[1::2]
        # Of what is one byte long, only a comma can stand between two strings.
        if (starts[1:] - ends[:-1] != len('","')).any():
            return None
        return cls(json, starts, ends)

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        quoted = [_encode(name) for name in names]
        lengths = np.fromiter(map(len, quoted), np.int64, len(quoted))
        ends = np.cumsum(lengths + 1) - 1
        return cls(b"[%b]" % b",".join(quoted), ends - lengths + 2, ends)

    def __len__(self) -> int:
        return len(self.starts)

    def texts(self, places: Rows) -> list[str]:
        """The names in these places, as strings."""
        return [_decode(quoted) for quoted in self._quoted(places)]

    def _quoted(self, places: Rows) -> list[bytes]:
        bounds = zip(self.starts[places].tolist(), self.ends[places].tolist(), strict=True)
        return [self.json[start - 1 : end + 1] for start, end in bounds]

    def only(self, chosen: NDArray[np.bool_]) -> "Names":
        """Those names, in their order."""
        if chosen.all():
            return self
        # Each name goes with its quotes and the comma, or bracket, after it.
        lengths = self.ends - self.starts + len('"",')
        after_bracket = np.frombuffer(self.json, np.uint8, offset=1)
        json = b"[%b]" % after_bracket[np.repeat(chosen, lengths)].tobytes()[:-1]
        kept = lengths[chosen]
        ends = np.cumsum(kept) - 1
        return Names(json, ends - kept + len('"",'), ends)

    def joined(self, between: bytes, chosen: NDArray[np.bool_]) -> bytes:
        """Those names in their quotes, and this between each two of them."""
        places = np.flatnonzero(chosen)
        if len(places) > _FEW and b"\\" not in self.json:
            return self.only(chosen).json[1:-1].replace(b'","', b'"%b"' % between)
        # A quote in a name, and a comma after it, would look like the end of the name.
        return between.join(self._quoted(places))

    def words(self, count: int) -> Words:
        """(count, n) the first words of each name, filled up with zeros."""
        size = count * _WORD_BYTES
        # The bytes from every place on; what a place is not followed by is zero.
        padded = self.json + bytes(size)
        at = np.ndarray(len(self.json), f"V{size}", padded, strides=(1,))
        lengths = np.minimum(self.ends - self.starts, size)
        words = at[self.starts].view("<u8").reshape(-1, count) & _masks(count).take(lengths, axis=0)
        return np.ascontiguousarray(words.T)


class NodeIndex:
    """The rows of one set of nodes, by the bytes of their names."""

    def __init__(self, snap: Snapshot) -> None:
        self._row_of = snap.row_of
        known = Names.of([node.name for node in snap.nodes])
        longest = int((known.ends - known.starts).max(initial=0))
        # One byte more than any has: where it is not zero, as no byte of JSON is, a name is longer.
        self._words = known.words(longest // _WORD_BYTES + 1)
        self._bits = (_SPARSE * len(known)).bit_length()
        # Of the names that meet in a place of one table, all but one are looked for in the next.
        hashes = _hashes(self._words)
        left = np.arange(len(known))
        self._tables: list[NDArray[np.int32]] = []
        for turn in range(_TABLES):
            table = np.zeros(1 << self._bits, np.int32)
            places = self._places(hashes[left], turn)
            table[places] = left
            left = left[table[places] != left]
            self._tables.append(table)

    def serves(self, snap: Snapshot) -> bool:
        """Whether the snapshot has the same nodes in the same rows: then it has the same map."""
        return snap.row_of is self._row_of

    def rows(self, names: Names) -> Rows:
        """Row of each name, in the order given; -1 where it is not known."""
        if not self._row_of:
            return np.full(len(names), -1, np.int64)
        words = names.words(len(self._words))
        hashes = _hashes(words)
        rows = self._look_up(0, hashes, words)
        for turn in range(1, _TABLES):
            left = np.flatnonzero(rows < 0)
            rows[left] = self._look_up(turn, hashes[left], words[:, left])
        left = np.flatnonzero(rows < 0)
        rows[left] = [self._row_of.get(name, -1) for name in names.texts(left)]
        return rows

    def _look_up(self, turn: int, hashes: Words, words: Words) -> Rows:
        """The row that the table has, if it is of the very same name, else -1."""
        rows = self._tables[turn].take(self._places(hashes, turn)).astype(np.int64)
        same = np.ones(len(rows), bool)
        for known, word in zip(self._words, words, strict=True):
            same &= known.take(rows) == word
        rows[~same] = -1
        return rows

    def _places(self, hashes: Words, turn: int) -> Rows:
        shifted = hashes >> np.uint64(turn * self._bits)
        return (shifted & np.uint64((1 << self._bits) - 1)).view(np.int64)


def _hashes(words: Words) -> Words:
    """(n,) a number of 64 bits made of the words of each name."""
    hashes = np.zeros(words.shape[1], np.uint64)
    for word in words:
        hashes = (hashes ^ word) * _ODD
        hashes ^= hashes >> _HALF
    return hashes


def _masks(count: int) -> Words:
    """(lengths, count) what of each word belongs to a name of so many bytes."""
    size = count * _WORD_BYTES
    within = np.arange(size + 1)[:, None] - np.arange(0, size, _WORD_BYTES)
    masks: Words = _FIRST_BYTES[np.clip(within, 0, _WORD_BYTES)]
    return masks
