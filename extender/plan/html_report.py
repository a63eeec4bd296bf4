"""The report of a plan as one HTML page, without scripts and without other files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from extender.plan.intervals import need_interval
from extender.plan.prices import monthly
from extender.plan.report import next_step_lines, row_name, table, table_rows
from extender.plan.sentences import assumptions, sentences
from extender.plan.study import Figures, Study

_STYLE = """
:root { color-scheme: light dark; --bar: #3b74b8; --text: #1c1c1c; --line: #c8c8c8; --page: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --bar: #6fa3e0; --text: #e8e8e8; --line: #555; --page: #181818; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .75rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
pre, .wide { overflow-x: auto; }
figure { margin: 1.5rem 0; overflow-x: auto; } figcaption { font-weight: 600; }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; }
svg .low { fill: var(--bar); } svg .range { fill: var(--bar); opacity: .45; }
svg line { stroke: var(--line); }
"""
#: Measures of a picture, in pixels.
_LEFT, _RIGHT, _ROW, _BAR, _LABEL = 330, 130, 26, 16, 480


def as_html(study: Study, prices: Mapping[str, float] | None, title: str) -> str:
    """Return the page: sentences, pictures, the table and the assumptions."""
    first, *rest = sentences(study, prices)
    heading, *rows = table(study, prices)
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
        *_pictures(study, prices),
        '<h2>All configurations</h2><div class="wide"><table><thead><tr>',
        *(f'<th scope="col">{escape(cell)}</th>' for cell in heading),
        "</tr></thead><tbody>",
    ]
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        parts.append(f"<tr>{cells}</tr>")
    parts.append("</tbody></table></div>")
    if steps := next_step_lines(study):
        parts.append(f"<h2>Next steps</h2><pre>{escape(_text_of(steps))}</pre>")
    parts.append("<h2>Assumptions</h2><ul>")
    parts += [f"<li>{escape(each)}</li>" for each in assumptions(study)]
    parts.append("</ul></body></html>\n")
    return "\n".join(parts)


def _text_of(steps: Sequence[str]) -> str:
    """Return the steps without their heading."""
    return "\n".join(steps[2:])


def _pictures(study: Study, prices: Mapping[str, float] | None) -> Iterator[str]:
    waits = [each.today_wait_s for row in table_rows(study) for each in row.figures]
    yield _picture(study, "GPUs for the same waiting time", lambda each: each.gpus, "", need=True)
    yield _picture(
        study,
        "GPU memory in use on these GPUs, mean over time",
        lambda each: 100 * each.memory_ratio if each.gpus else None,
        " %",
    )
    if prices is not None:
        costs = prices
        yield _picture(
            study, "Cost of these GPUs a month", lambda each: _cost(each, costs), "", need=True
        )
    if any(each.contention.competing_ratio for row in study.rows for each in row.figures):
        yield _picture(
            study,
            "Running time in which pods that share a GPU compete for its SMs",
            lambda each: 100 * each.contention.competing_ratio if each.gpus else None,
            " %",
        )
    if any(each.out_of_memory for row in study.rows for each in row.figures):
        yield _picture(study, "Pods that run out of memory", lambda each: each.out_of_memory, "")
    if any(wait_s is not None and wait_s >= 1 for wait_s in waits):
        yield _picture(
            study, "Mean waiting time on today's GPUs", lambda each: each.today_wait_s, " s"
        )


def _cost(figures: Figures, prices: Mapping[str, float]) -> float | None:
    return monthly(figures.models, prices) if figures.gpus else None


def _picture(
    study: Study,
    caption: str,
    of: Callable[[Figures], float | None],
    unit: str,
    need: bool = False,
) -> str:
    """Return a figure with a bar for each configuration, up to its lowest value, and its range;
    ``need``: the values are needs, so the range is that of another history."""
    rows = [
        (row_name(study, row), _known(row.figures, of, row.spread_ratio if need else 0.0))
        for row in table_rows(study)
    ]
    largest = max((high for _, ends in rows if ends for high in ends), default=0.0) or 1.0
    height = _ROW * len(rows) + 8
    width = _LEFT + _LABEL + _RIGHT
    lines = [
        f"<figure><figcaption>{escape(caption)}</figcaption>",
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(caption)}">',
        f'<line x1="{_LEFT}" y1="0" x2="{_LEFT}" y2="{height}"/>',
    ]
    for number, (name, ends) in enumerate(rows):
        top = 4 + number * _ROW
        base = top + _BAR - 3
        lines.append(f'<text x="{_LEFT - 8}" y="{base}" text-anchor="end">{escape(name)}</text>')
        if ends is None:
            lines.append(f'<text x="{_LEFT + 6}" y="{base}">no number suffices</text>')
            continue
        low, high = (round(each / largest * _LABEL, 1) for each in ends)
        lines.append(
            f'<rect class="low" x="{_LEFT}" y="{top}" width="{low}" height="{_BAR}"/>'
            f'<rect class="range" x="{_LEFT + low}" y="{top}" width="{round(high - low, 1)}" '
            f'height="{_BAR}"/>'
            f'<text x="{_LEFT + high + 6}" y="{base}">{_text(ends)}{unit}</text>'
        )
    return "\n".join([*lines, "</svg></figure>"])


def _known(
    figures: Sequence[Figures], of: Callable[[Figures], float | None], spread_ratio: float
) -> tuple[float, float] | None:
    found = [value for each in figures if (value := of(each)) is not None]
    if len(found) < len(figures):
        return None
    low, high = need_interval(found, spread_ratio)
    return max(0.0, low), high


def _text(ends: tuple[float, float]) -> str:
    low, high = (f"{round(each):,}" for each in ends)
    return low if low == high else f"{low} to {high}"
