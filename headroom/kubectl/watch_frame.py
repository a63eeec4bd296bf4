"""Draws `top --watch` as lines of text that fit a terminal: pure functions.

From the top: the memory of the fleet with an hour of history, what is at risk, waiting and broken,
the list, the GPU of the selected line, and the keys.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contract.device_names import noun
from contract.printable import printable
from contract.quantity import gib
from headroom.kubectl.table import shortened, wrapped
from headroom.kubectl.top import age, counted
from headroom.kubectl.watched_fleet import KINDS, Order, Row

Body = Mapping[str, Any]
Style = Literal["", "bold", "red", "quiet", "selected"]
Line = tuple[Style, str]

KEYS = (
    "q quit  n nodes  g GPUs  sort: w worst, a name, r reserved, u used, m SM  t troubled  / search"
)
_SHORT_KEYS = "q quit  n/g nodes, GPUs  w/a/r/u/m sort  t troubled  / search"
#: Levels of a sparkline, and those for terminals that show only ASCII.
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
HOUR_S = 3600
#: Characters of a line in a pipe.
PIPE_WIDTH = 200
#: Lines of a frame in a pipe, with the line of keys, which is not printed there.
_PIPE_HEIGHT = 35
#: Width below which the memory column is left out, and bars are short.
_WIDE = 100
#: Maximum number of entries of each list above the table, and of pods below it.
_NEWS, _PODS = 3, 3
_LEAST_ROWS = 3
#: Lines of a message that is shortened.
_SHORT = 2
_LEAST_SPARKLINE = 10
#: Seconds after which answers are no longer called live.
_LIVE_S = 8.0
#: Shares above this are shown as this value.
_MOST_PERCENT = 999


@dataclass(frozen=True, slots=True)
class Detail:
    """The GPU of the selected line: answers of /v1/nodes/NODE/devices/UUID and of its history."""

    node: str
    gpu: str
    body: Body
    history: Body


@dataclass(frozen=True, slots=True)
class Reading:
    """The last answers of the console."""

    #: Unix time of the answers.
    at_s: float
    fleet: Body
    overview: Body
    history: Body
    gpus: list[Row]
    nodes: list[Row]
    detail: Detail | None = None
    observes: bool = False
    #: The inputs of the console, from /v1/inputs.
    inputs: Sequence[Body] = ()


@dataclass(slots=True)
class Choice:
    """Choices that the user makes with keys."""

    by_node: bool = False
    order: Order = Order.WORST
    troubled: bool = False
    search: str = ""
    #: Whether the user is typing the search.
    typing: bool = False
    selected: int = 0
    #: First row that is shown.
    first: int = 0


def frame(
    reading: Reading,
    rows: Sequence[Row],
    choice: Choice,
    width: int,
    height: int,
    now_s: float,
    problem: str = "",
    levels: str = BLOCKS,
) -> list[Line]:
    """Return at most ``height`` lines of at most ``width`` characters.

    ``rows``: those to list, in order. ``problem``: why the last answers are old; empty if they are
    not. Moves ``choice.selected`` and ``choice.first`` into the list.
    """
    above = [*_head(reading, now_s, problem, width), *_memory(reading, width, levels)]
    news = list(_news(reading.overview, width))
    choice.selected = max(0, min(choice.selected, len(rows) - 1))
    below = list(_detail(reading, rows[choice.selected], levels, width)) if rows else []
    spare = height - len(above) - 2 - _LEAST_ROWS  # the header of the table, and the keys
    if len(news) > (room := max(1, spare - len(below))):
        news = list(_news(reading.overview, width, is_short=True))
    if len(news) > room:
        news = news[:room] if room == 1 else [*news[: room - 1], _continued(news[room - 1])]
    below = below[: max(0, spare - len(news))]
    shown = max(0, height - len(above) - len(news) - len(below) - 2)
    choice.first = max(
        min(choice.first, choice.selected, max(0, len(rows) - shown)), choice.selected - shown + 1
    )
    page = rows[choice.first : choice.first + shown]
    lines = [*above, *news, *_table(page, choice, width)]
    if not rows:
        lines.append(("", "no node matches" if choice.search or choice.troubled else "no GPUs"))
    lines += [("", "")] * (height - 1 - len(lines) - len(below))
    lines += [*below, _foot(choice, len(rows), width)]
    cut = [(style, _cut(printable(text), width)) for style, text in lines[:height]]
    return cut if levels == BLOCKS else [(style, text.replace("…", "~")) for style, text in cut]


def plain(
    reading: Reading,
    rows: Sequence[Row],
    choice: Choice,
    now_s: float,
    problem: str = "",
    width: int = PIPE_WIDTH,
) -> str:
    """Return the frame as ASCII text for a pipe: without empty lines and the line of keys."""
    lines = frame(reading, rows, choice, width, _PIPE_HEIGHT, now_s, problem, ASCII)[:-1]
    return "\n".join(text.rstrip() for _, text in lines if text.strip())


def sparkline(
    at_s: Sequence[float],
    values: Sequence[float | None],
    most: float,
    width: int,
    levels: str = BLOCKS,
) -> str:
    """Return the last hour of a series, in which a value holds until the next, at ``width`` times.

    ``most``: the value of the highest level. Times without a value are spaces.
    """
    if not at_s or most <= 0:
        return " " * width
    shown, position, end_s = [], -1, at_s[-1]
    for number in range(width):
        when_s = end_s - HOUR_S * (width - 1 - number) / max(1, width - 1)
        while position + 1 < len(at_s) and at_s[position + 1] <= when_s:
            position += 1
        value = values[position] if position >= 0 else None
        if value is None:
            shown.append(" ")
            continue
        share = min(1.0, max(0.0, value / most))
        shown.append(levels[min(len(levels) - 1, int(share * len(levels)))])
    return "".join(shown)


def bar(percent: int, width: int) -> str:
    """Return a share as a bar; only 0 is an empty one, only 100 or more a full one, and an unknown
    share has none."""
    if percent < 0:
        return " " * width
    filled = round(width * percent / 100)
    if 0 < percent < 100:
        filled = min(max(filled, 1), width - 1)
    filled = max(0, min(filled, width))
    return "#" * filled + "-" * (width - filled)


def clock(at_s: float) -> str:
    """Return a Unix time in the zone of the terminal, with the zone."""
    local = time.localtime(at_s)
    return time.strftime("%H:%M:%S ", local) + (local.tm_zone or "")


def _head(reading: Reading, now_s: float, problem: str, width: int) -> Iterator[Line]:
    models = reading.fleet["models"]
    whole = sum(model["allocatable_bytes"] for model in models)
    gpus = counted(sum(model["devices"] for model in models), "GPU")
    left = f"{counted(reading.fleet['nodes'], 'node')}, {gpus}, {gib(whole)} allocatable"
    if reading.observes:
        left += "; mode observe"
    at_s = reading.at_s
    if not problem and now_s - at_s > _LIVE_S:
        problem = "the console does not answer"
    for each in reading.inputs:
        if not problem and each["kind"] == "api_server" and each["message"]:
            problem, at_s = each["message"], at_s - (each["age_s"] or 0.0)
    if not problem:
        right = f"As of {clock(at_s)}, live"
        yield "bold", f"{left}{right:>{max(len(right) + 2, width - len(left))}}"
        return
    yield "bold", left
    yield "red", f"Not up to date since {clock(at_s)} ({age(now_s - at_s)}): {problem}"


def _memory(reading: Reading, width: int, levels: str) -> Iterator[Line]:
    models, history = reading.fleet["models"], reading.history
    whole = sum(model["allocatable_bytes"] for model in models)
    amounts = {
        name: sum(model[f"{field}_bytes"] for model in models)
        for name, field in (
            ("RESERVED", "reservation"),
            ("USED", "used"),
            ("HEADROOM", "headroom"),
        )
    }
    room = max(map(len, map(gib, amounts.values())))
    series = {each["kind"]: each["values"] for each in history["series"]}
    bars = 20 if width >= _WIDE else 12
    for name, amount in amounts.items():
        percent = round(100 * amount / whole) if whole else 0
        line = f"{name:<8}  {gib(amount):>{room}}  {percent:>3} %  [{bar(percent, bars)}]"
        left = min(60, width - len(line) - len("  last hour") - 2)
        values = series.get(name.lower(), ())
        if left >= _LEAST_SPARKLINE and values:
            line += f"  {sparkline(history['at_s'], values, whole, left, levels)}  last hour"
        yield "", line


def _news(overview: Body, width: int, is_short: bool = False) -> Iterator[Line]:
    """Yield the counts of the overview, and its most urgent entries in the page's words.

    ``is_short``: show at most two lines of why pods wait, so that the fix still fits.
    """
    totals = overview["totals"]
    counts = totals["at_risk"], totals["waiting_pods"], totals["broken"]
    if not any(counts):
        yield "", "All is well: nothing is at risk, no pod waits for a GPU, nothing is broken."
        return
    at_risk, waiting_pods, problems = map(counted, counts, ("GPU", "pod", "problem"))
    yield "bold", f"At risk {at_risk}   Waiting {waiting_pods}   Broken {problems}"
    risks = overview["at_risk"][:_NEWS]
    waiting = overview["waiting"][: max(1, _NEWS - len(risks))]
    for risk in risks:
        yield from _entry(_risk(risk), width)
    for group in waiting:
        lines = list(_entry(f"{_owner(group)}: {group['message']}", width))
        if is_short and len(lines) > _SHORT:
            lines = [*lines[: _SHORT - 1], _continued(lines[_SHORT - 1])]
        yield from lines
        if group["fix"]:  # cut if it is too long: `why` prints it whole
            yield "", f"    Fix: {group['fix']}"
    for fault in overview["broken"][: max(0, _NEWS - len(risks) - len(waiting))]:
        yield from _entry(fault["message"], width)
        for line in wrapped(fault["fix"], width, "    ", "      "):
            yield "quiet", line


def _entry(text: str, width: int) -> Iterator[Line]:
    for line in wrapped(text, width, "  ", "    "):
        yield "", line


def _risk(risk: Body) -> str:
    names = [f"{pod['namespace']}/{pod['name']}" for pod in risk["pods"][:2]]
    known = risk["message"].split()
    parts = [_risk_in_words(risk), ", ".join(name for name in names if name not in known)]
    return f"{risk['node']} {noun(risk['gpu'])}: {'; '.join(filter(None, parts))}"


def _risk_in_words(risk: Body) -> str:
    return f"{KINDS.get(risk['kind'], risk['kind'])}: {risk['message']}"


def _owner(group: Body) -> str:
    name = f"{group['namespace']}/{group['owner_name']}"
    pods = counted(group["pods"], "pod")
    waited = "" if group["oldest_s"] is None else f" for {age(group['oldest_s'])}"
    return f"{name} ({pods} waiting{waited})"


def _table(page: Sequence[Row], choice: Choice, width: int) -> Iterator[Line]:
    is_wide = width >= _WIDE
    bars = 16 if width >= 130 else 10 if is_wide else 6
    first = "GPUS" if choice.by_node else "GPU"
    which = [str(row.devices) if choice.by_node else row.gpu or "-" for row in page]
    gpu = max([4, *map(len, which)])
    memory = f"{'MEMORY':>10}  " if is_wide else ""
    fixed = gpu + 2 + len(memory) + 2 * (8 + bars) + 7
    state = max([13, *(len(_state(row)) for row in page)])
    names = [row.node for row in page]
    longest = max([len("NODE"), *map(len, names)])
    room = max(12, min(longest, width - fixed - min(state, max(13, (width - fixed) // 2)) - 4))
    header = (
        f"{'NODE':<{room}}  {first:>{gpu}}  {memory}{'RESERVED':<{6 + bars}}  "
        f"{'USED':<{6 + bars}}  {'SM':>5}  STATE"
    )
    yield "bold", header
    rows = zip(page, shortened(names, room), which, strict=True)
    for number, (row, name, one) in enumerate(rows):
        amount = f"{row.memory_gib:>6,.1f} GiB  " if is_wide else ""
        text = (
            f"{name:<{room}.{room}}  {one:>{gpu}}  {amount}"
            f"{_share(row.reserved)} {bar(row.reserved, bars)}  "
            f"{_share(row.used)} {bar(row.used, bars)}  {_share(row.sm)}  {_state(row)}"
        )
        if choice.first + number == choice.selected:
            yield "selected", f"{text:<{width}}"
        else:
            yield ("red" if row.problems else ""), text


def _state(row: Row) -> str:
    return "; ".join(row.problems) or "ok"


def _share(percent: int) -> str:
    return f"{'-':>5}" if percent < 0 else f"{min(percent, _MOST_PERCENT):>3} %"


def _detail(reading: Reading, row: Row, levels: str, width: int) -> Iterator[Line]:
    """Yield the GPU of the selected row: an hour of its use, and its pods in the page's words."""
    found = reading.detail
    if found is None or (found.node, found.gpu) != (row.node, row.gpu):
        yield (
            "quiet",
            f"{row.node}: reading ..." if row.gpu is not None else f"{row.node}: no GPU",
        )
        return
    device, holders = found.body["device"], found.body["holders"]
    yield "bold", f"{found.node} {noun(found.gpu)}, {device['model']}"
    for text in wrapped(_verdict(found, row, device), width, "  "):
        yield ("red" if row.problems else ""), text
    memory = device["memory_bytes"]
    used = "unknown" if device["used_bytes"] < 0 else gib(device["used_bytes"])
    line = f"  in use {used} of {gib(memory)}"
    left = min(60, width - len(line) - len("  last hour") - 2)
    values = next((e["values"] for e in found.history["series"] if e["kind"] == "used"), ())
    if values and left >= _LEAST_SPARKLINE:
        drawn = sparkline(found.history["at_s"], values, memory, left, levels)
        line += f"  {drawn}  last hour"
    yield "", line
    if gib(device["unattributed_bytes"]) != gib(0):
        yield "red", f"  {gib(device['unattributed_bytes'])} unattributed: used by no known pod"
    for held in sorted(holders, key=lambda held: -held["charged_bytes"])[:_PODS]:
        yield _pod(held)
    if len(holders) > _PODS:
        yield "quiet", f"  {counted(len(holders) - _PODS, 'more pod')}"
    if not holders:
        yield "quiet", "  No pod holds memory of this GPU."


def _verdict(found: Detail, row: Row, device: Body) -> str:
    """Return the risk of the GPU with its numbers, its fault, or its free memory."""
    if found.body["risk"]:
        return _risk_in_words(found.body["risk"])
    if device["unhealthy"]:
        return f"unhealthy: {device['unhealthy_detail'] or device['unhealthy']}"
    free = f"{gib(max(0, device['headroom_bytes']))} free for reservation"
    return "; ".join((*row.problems, free))


def _pod(held: Body) -> Line:
    reserved = f"{gib(held['requested_bytes'])} reserved" if held["reserved"] else "no reservation"
    measured = held["measured_bytes"]
    used = "use unknown" if measured is None else f"{gib(measured)} in use"
    text = f"  {held['namespace']}/{held['name']}: {reserved}, {used}"
    if (over := held["exceeds_by_bytes"]) > 0:
        return "red", f"{text}, {gib(over)} more than reserved"
    return "", text


def _foot(choice: Choice, rows: int, width: int) -> Line:
    if choice.typing:
        return "bold", f"Search: {choice.search}_   (Enter keeps it, Esc clears it)"
    place = f"{min(rows, choice.selected + 1):,} of {rows:,} by {choice.order.value}"
    if choice.search:
        place += f", search {choice.search!r}"
    if choice.troubled:
        place += ", only troubled"
    keys = KEYS if len(place) + 3 + len(KEYS) <= width else _SHORT_KEYS
    return "quiet", f"{place}   {keys}"


def _continued(line: Line) -> Line:
    """Return the line with an ellipsis at its end."""
    style, text = line
    return style, f"{text} …"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
