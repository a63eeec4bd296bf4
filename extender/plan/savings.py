"""Computes the ranges of what sharing saves against unshared GPUs: part of the GPUs, and money."""

from collections.abc import Mapping

from extender.plan.intervals import interval, part_interval, saving_interval
from extender.plan.prices import monthly
from extender.plan.study import Row, Study
from extender.plan.wording import outward


def saved_ratio(study: Study, row: Row) -> tuple[float, float] | None:
    """Return the range of the part of the unshared GPUs that ``row`` saves; None: unknown.

    It is negative if more GPUs are needed than unshared.
    """
    if row is study.unshared:
        return 0.0, 0.0
    saved = [
        1 - gpus / unshared
        for gpus, unshared in zip(row.gpus, study.unshared.gpus, strict=True)
        if gpus is not None and unshared
    ]
    if not saved:
        return None
    pairs = _drawn(study, row)
    drawn = [1 - shared / unshared for shared, unshared in pairs if unshared]
    return part_interval(saved, drawn, row.node_gpus / (study.unshared.gpus[0] or 1))


def _drawn(study: Study, row: Row) -> list[tuple[float, float]]:
    """Return shared and unshared demands of drawn histories; none if one of them has no range."""
    pair = row.demands.drawn, study.unshared.demands.drawn
    return list(zip(*pair, strict=True)) if all(pair) else []


def saved_month_cost(study: Study, row: Row, prices: Mapping[str, float]) -> tuple[int, int] | None:
    """Return the range of what ``row`` saves a month, in the currency of ``prices``."""
    saved = [
        monthly(unshared.models, prices) - monthly(each.models, prices)
        for each, unshared in zip(row.figures, study.unshared.figures, strict=True)
        if each.gpus is not None and unshared.gpus is not None
    ]
    if not saved:
        return None
    drawn = [unshared - shared for shared, unshared in _drawn(study, row)]
    if drawn and min(saved) <= 0 < max(saved):
        # Relative to a saving near 0, a range would be too narrow.
        return outward(*interval(saved))
    return outward(*saving_interval(saved, drawn))
