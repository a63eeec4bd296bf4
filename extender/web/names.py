"""Node names as they stand in a body, and the rows that they mean.

kube-scheduler sends thousands of names with every call, each time in another order. To make a
string of each, and to look each up, takes longer than to weigh all nodes. So they stay the bytes
that came, eight bytes to a word, and are compared with the known names all at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

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
#: Places in a table for each known name: few names meet, and the table stays in the processor's
#: cache.
_SPARSE = 4
#: The longest name of a node that Kubernetes allows.
_MOST_BYTES = 253
#: Eight bytes that are in no text.
_NO_NAME = np.uint64((1 << 64) - 1)
#: Ways of hashing to choose from: numbered names lie apart under some, and meet under others.
_SEEDS = range(8)
#: Names that are sooner copied one by one than picked from all.
_FEW = 300

#: (words, names), or (names,).
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """A JSON list of strings, where each of them begins, and how long it is, without its quotes.

    No two names lie in one place; a name is written as msgspec writes it.
    """

    json: bytes
    starts: Rows
    lengths: Rows
    #: Of each name where all are known to be equally long; else None.
    length: int | None = None

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
        is_quote = np.frombuffer(json, np.uint8) == _QUOTE
        length = _alike(json, is_quote)
        starts, lengths = _apart(is_quote) if length is None else _places(json, length)
        # At least a comma stands between two strings, and nothing else that is one byte long.
        if len(json) != lengths.sum() + len('"",') * len(starts) + len("]"):
            return None
        return cls(json, starts, lengths, length or None)

    @classmethod
    def of(cls, names: Sequence[str]) -> "Names":
        quoted = [_encode(name) for name in names]
        lengths = np.fromiter(map(len, quoted), np.int64, len(quoted)) - len('""')
        return cls(b"[%b]" % b",".join(quoted), _starts(lengths), lengths)

    def __len__(self) -> int:
        return len(self.starts)

    def texts(self, places: Rows) -> list[str]:
        """The names in these places, as strings."""
        return [_decode(quoted) for quoted in self._quoted(places)]

    def _quoted(self, places: Rows) -> list[bytes]:
        starts = self.starts[places]
        ends = starts + self.lengths[places]
        return [
            self.json[start - 1 : end + 1]
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def only(self, chosen: NDArray[np.bool_]) -> "Names":
        """Those names, in their order."""
        if chosen.all():
            return self
        if not chosen.any():
            return Names.of([])
        # Each name goes with its quotes and the comma, or bracket, after it.
        if self.length is not None:
            each = len('"",') + self.length
            kept = np.frombuffer(self.json, f"V{each}", offset=len("[")).take(chosen.nonzero()[0])
            json = b"[%b]" % kept.tobytes()[:-1]
            return Names(json, *_places(json, self.length), self.length)
        lengths = self.lengths[chosen]
        after_bracket = np.frombuffer(self.json, np.uint8, offset=len("["))
        kept = after_bracket[np.repeat(chosen, self.lengths + len('"",'))]
        return Names(b"[%b]" % kept.tobytes()[:-1], _starts(lengths), lengths)

    def joined(self, between: bytes, chosen: NDArray[np.bool_]) -> bytes:
        """Those names in their quotes, and this between each two of them."""
        places = np.flatnonzero(chosen)
        if len(places) > _FEW and self.length is not None:
            return self._joined_apart(between, places, self.length)
        if len(places) > _FEW and b"\\" not in self.json:
            return self.only(chosen).json[1:-1].replace(b'","', b'"%b"' % between)
        # A quote in a name, and a comma after it, would look like the end of the name.
        return between.join(self._quoted(places))

    def _joined_apart(self, between: bytes, places: Rows, length: int) -> bytes:
        """The same where all names are equally long: at equal distances."""
        each = b'"%b"%b' % (bytes(length), between)
        joined = bytearray(each * len(places))
        there = np.ndarray(len(places), f"V{length}", joined, len('"'), (len(each),))
        apart = length + len('"",')
        there[:] = np.ndarray(len(self), f"V{length}", self.json, len('["'), (apart,)).take(places)
        return bytes(joined[: len(joined) - len(between)])

    def words(self, count: int) -> Words:
        """(count, n) the first words of each name, filled up with zeros."""
        size = count * _WORD_BYTES
        # The bytes from every place on; what a place is not followed by is zero.
        padded = self.json + bytes(size)
        if self.length is not None:
            return self._words_apart(padded, count, self.length)
        at = np.ndarray(len(self.json), f"V{size}", padded, strides=(1,))
        lengths = np.minimum(self.lengths, size)
        words = at[self.starts].view("<u8").reshape(-1, count) & _masks(count).take(lengths, axis=0)
        return words.T

    def _words_apart(self, padded: bytes, count: int, length: int) -> Words:
        """The same where all names are equally long: at equal distances."""
        masks = _masks(count)[min(length, count * _WORD_BYTES)]
        first, apart = int(self.starts[0]), length + len('"",')
        words = np.empty((count, len(self)), "<u8")
        for i, mask in enumerate(masks):
            there = np.ndarray(len(self), "<u8", padded, first + i * _WORD_BYTES, (apart,))
            np.bitwise_and(there, mask, out=words[i])
        return words


def _apart(is_quote: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """Where each name begins, and how long it is."""
    quotes = np.flatnonzero(is_quote)
    starts = quotes[::2] + 1
    return starts, quotes[1::2] - starts


def _alike(json: bytes, is_quote: NDArray[np.bool_]) -> int | None:
    """How long each name is where all are as long as the first, as those of one pool often are:
    then it is enough to look where the quotes should be. None where they are not."""
    length = json.index(_QUOTE, len('["')) - len('["')
    each = length + len('"",')
    count, rest = divmod(len(json) - len("["), each)
    if rest:
        return None
    first, last = is_quote[1::each], is_quote[1 + length + len('"') :: each]
    if not (first.all() and last.all() and np.count_nonzero(is_quote) == 2 * count):
        return None
    return length


def _places(json: bytes, length: int) -> tuple[Rows, Rows]:
    """Where each name begins, and how long it is, where all are as long."""
    starts = np.arange(len('["'), len(json), length + len('"",'))
    return starts, np.full(len(starts), length)


def _starts(lengths: Rows) -> Rows:
    """Where each name of a list begins that has nothing but commas between them."""
    starts: Rows = np.cumsum(lengths + len('"",'))
    return starts - lengths - len('",') + len("[")


class NodeIndex:
    """The rows of one set of nodes, by the bytes of their names."""

    def __init__(self, snap: Snapshot) -> None:
        self._row_of = snap.row_of
        known = Names.of([node.name for node in snap.nodes])
        # Longer ones than Kubernetes allows would cost the square of their length: they are in the
        # map alone.
        short = np.flatnonzero(known.lengths <= _MOST_BYTES)
        longest = int(known.lengths[short].max(initial=0))
        # One byte more than any has: where it is not zero, as no byte of JSON is, a name is longer.
        self._count = longest // _WORD_BYTES + 1
        words = known.words(self._count)
        words[:, known.lengths > _MOST_BYTES] = _NO_NAME
        missed = short
        for seed in _SEEDS:
            table = _Table(words, short, seed)
            left = short[table.rows(words[:, short]) < 0]
            if not seed or len(left) < len(missed):
                first, missed = table, left
            if not len(missed):
                break
        #: Of the names that meet in the first, all but one are in the second, or met there again.
        self._tables = first, _Table(words, missed, len(_SEEDS))

    def serves(self, snap: Snapshot) -> bool:
        """Whether the snapshot has the same nodes in the same rows: then it has the same map."""
        return snap.row_of is self._row_of

    def rows(self, names: Names) -> Rows:
        """Row of each name, in the order given; -1 where it is not known."""
        if not self._row_of:
            return np.full(len(names), -1, np.int64)
        words = names.words(self._count)
        first, second = self._tables
        rows = first.rows(words)
        left = np.flatnonzero(rows < 0)
        if len(left):
            rows[left] = second.rows(words[:, left])
            left = left[rows[left] < 0]
            rows[left] = [self._row_of.get(name, -1) for name in names.texts(left)]
        return rows


class _Table:
    """Finds the rows of some names, each at the place that its words are hashed to."""

    def __init__(self, words: Words, rows: Rows, seed: int) -> None:
        self._words = words
        random = Random(seed)
        self._factors = [np.uint64(random.getrandbits(64) | 1) for _ in words]
        bits = (_SPARSE * words.shape[1]).bit_length()
        self._shift = np.uint64(64 - bits)
        self._rows = np.zeros(1 << bits, np.int64)
        self._rows[self._places(words[:, rows])] = rows

    def rows(self, words: Words) -> Rows:
        """The row of each name, -1 where the table has another one in its place, or none."""
        rows = self._rows.take(self._places(words))
        same = self._words[0].take(rows) == words[0]
        for known, word in zip(self._words[1:], words[1:], strict=True):
            same &= known.take(rows) == word
        return np.where(same, rows, -1)

    def _places(self, words: Words) -> Rows:
        """Of a sum of products the upper bits depend on all bits of all words."""
        hashes: Words = words[0] * self._factors[0]
        for word, factor in zip(words[1:], self._factors[1:], strict=True):
            hashes += word * factor
        return (hashes >> self._shift).view(np.int64)


@cache
def _masks(count: int) -> Words:
    """(lengths, count) what of each word belongs to a name of so many bytes."""
    size = count * _WORD_BYTES
    within = np.arange(size + 1)[:, None] - np.arange(0, size, _WORD_BYTES)
    masks: Words = _FIRST_BYTES[np.clip(within, 0, _WORD_BYTES)]
    return masks
