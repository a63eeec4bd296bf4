"""The report of a plan as one HTML page that needs no scripts and no other files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape

from headroom.planner.intervals import interval, need_interval
from headroom.planner.prices import monthly
from headroom.planner.report import Shown, next_step_lines, shown_rows, table
from headroom.planner.sentences import assumptions, sentences
from headroom.planner.study import Figures, Row, Study

_STYLE = """
:root { color-scheme: light dark; --bar: #3b74b8; --bad: #b3261e; --text: #1c1c1c; --line: #c8c8c8;
  --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --bar: #6fa3e0; --bad: #f2857c; --text: #e8e8e8; --line: #555; --page: #181818; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .5rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
pre, .wide { overflow-x: auto; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .4rem .75rem;
  align-items: center; margin-top: .5rem; font-size: .85rem; font-variant-numeric: tabular-nums; }
.name { text-align: right; }
svg { width: 100%; height: 1rem; border-left: 1px solid var(--line); display: block; }
svg .low { fill: var(--bar); } svg .range { fill: var(--bar); opacity: .45; }
svg.bad rect { fill: var(--bad); } .bad { color: var(--bad); }
@media (max-width: 45rem) {
  .bars { grid-template-columns: 1fr max-content; }
  .name { grid-column: 1 / -1; text-align: left; margin-bottom: -.4rem; }
}
"""
_RED = " Red configurations are no choice: pods run out of memory."


def as_html(study: Study, prices: Mapping[str, float] | None, title: str) -> str:
    """Return the page with its sentences, charts, table and assumptions."""
    first, *rest = sentences(study, prices)
    heading, *rows = table(study, prices)
    shown = shown_rows(study, prices)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(first)}</p>",
        "<ul>",
        *(f"<li>{escape(each)}</li>" for each in rest),
        "</ul>",
        "<p>Bars are dark up to the low end of a range, and pale up to its high end."
        + (_RED if any(each.row.loses_pods for each in shown) else "")
        + "</p>",
        *_pictures(shown, dict(zip(heading, zip(*rows, strict=True), strict=True)), prices),
        '<h2>All configurations</h2><div class="wide"><table><thead><tr>',
        *(f'<th scope="col">{escape(cell)}</th>' for cell in heading),
        "</tr></thead><tbody>",
    ]
    for each, row in zip(shown, rows, strict=True):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        parts.append(f"<tr{_bad(each.row)}>{cells}</tr>")
    parts.append("</tbody></table></div>")
    if steps := next_step_lines(study):
        parts.append(f"<h2>Next steps</h2><pre>{escape(_text_of(steps))}</pre>")
    parts.append("<h2>Assumptions</h2><ul>")
    parts += [f"<li>{escape(each)}</li>" for each in assumptions(study)]
    parts.append("</ul></body></html>\n")
    return "\n".join(parts)


def _text_of(steps: Sequence[str]) -> str:
    """Return the text of the steps without their heading."""
    return "\n".join(steps[2:])


def _bad(row: Row) -> str:
    return ' class="bad"' if row.loses_pods else ""


def _pictures(
    shown: Sequence[Shown], cells: Mapping[str, Sequence[str]], prices: Mapping[str, float] | None
) -> Iterator[str]:
    """Yield the charts. ``cells`` maps the heading of a table column to its cells, which the charts
    repeat next to the bars."""
    rows = [each.row for each in shown]
    bad = [each.row.loses_pods for each in shown]
    picture, texts = partial(_picture, bad), partial(_with_lost, shown, cells)

    def of(get: Callable[[Figures], float | None]) -> list[list[float | None]]:
        return [[get(each) for each in row.figures] for row in rows]

    def needs(values: Sequence[Sequence[float | None]]) -> list[_Ends | None]:
        reaches = [row.variation.reach for row in rows]
        return [
            _range(some, partial(need_interval, reach=reach))
            for some, reach in zip(values, reaches, strict=True)
        ]

    def figures(values: Sequence[Sequence[float | None]]) -> list[_Ends | None]:
        return [_range(some, interval) for some in values]

    names = cells["configuration"]
    gpus, memory = of(lambda each: each.gpus), of(_if_any(lambda each: each.memory_ratio))
    yield picture("GPUs for the same waiting time", names, needs(gpus), texts("GPUs"))
    yield picture(
        "GPU memory in use on these GPUs, mean over time", names, figures(memory), cells["memory"]
    )
    if prices is not None:
        costs = of(_if_any(lambda each: monthly(each.models, prices)))
        yield picture("Cost of these GPUs a month", names, needs(costs), texts("a month"))
    competing = of(_if_any(lambda each: each.contention.competing_ratio))
    if any(map(any, competing)):
        caption = "Running time in which pods that share a GPU compete for it"
        yield picture(caption, names, figures(competing), cells["competing"])
    lost = of(lambda each: each.out_of_memory)
    if any(map(any, lost)):
        yield picture("Pods that run out of memory", names, figures(lost), cells["out of memory"])
    waits = of(lambda each: each.today_wait_s)
    if any(wait_s is not None and wait_s >= 1 for some in waits for wait_s in some):
        ends = [_range(some, lambda found: (min(found), max(found))) for some in waits]
        yield picture("Mean waiting time on today's GPUs", names, ends, cells["wait today"])


_Ends = tuple[float, float]


def _if_any(get: Callable[[Figures], float]) -> Callable[[Figures], float | None]:
    """Return a function that calls ``get``, or returns None if no number of GPUs suffices."""
    return lambda each: get(each) if each.gpus else None


def _range(values: Sequence[float | None], of: Callable[[Sequence[float]], _Ends]) -> _Ends | None:
    """Return the range of the values, cut off at 0, or None if a value is missing."""
    known = [each for each in values if each is not None]
    if len(known) < len(values) or not known:
        return None
    low, high = of(known)
    return max(0.0, low), high


def _picture(
    bad: Sequence[bool],
    caption: str,
    names: Sequence[str],
    ranges: Sequence[_Ends | None],
    texts: Sequence[str],
) -> str:
    """Return a chart with one bar for each configuration, which is dark up to the lowest value and
    pale up to the highest, and red if the configuration is ``bad``."""
    largest = max((high for ends in ranges if ends for high in ends), default=0.0) or 1.0
    lines = [f'<figure><figcaption>{escape(caption)}</figcaption><div class="bars">']
    for name, ends, text, is_bad in zip(names, ranges, texts, bad, strict=True):
        low, high = (round(100 * each / largest, 1) for each in ends or (0.0, 0.0))
        red = ' class="bad"' if is_bad else ""
        lines += [
            f'<span class="name">{escape(name)}</span>',
            f'<svg aria-hidden="true"{red}><rect class="low" width="{low}%" height="100%"/>'
            f'<rect class="range" x="{low}%" width="{round(high - low, 1)}%" height="100%"/></svg>',
            f"<span{red}>{escape(text)}</span>",
        ]
    return "\n".join([*lines, "</div></figure>"])


def _with_lost(
    shown: Sequence[Shown], cells: Mapping[str, Sequence[str]], column: str
) -> list[str]:
    """Return the cells of a column, with the number of pods that the configuration loses."""
    return [
        f"{text}; {lost} pods run out of memory" if each.row.loses_pods else text
        for each, text, lost in zip(shown, cells[column], cells["out of memory"], strict=True)
    ]
