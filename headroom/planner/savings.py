"""Computes ranges of the GPUs (as a ratio) and the money that sharing saves."""

from collections.abc import Mapping

from headroom.planner.intervals import Reach, interval, part_interval, saving_interval, wider
from headroom.planner.prices import monthly
from headroom.planner.study import Row, Study
from headroom.planner.wording import outward


def saved_ratio(study: Study, row: Row) -> tuple[float, float] | None:
    """Return the range of the ratio of the unshared GPUs that ``row`` saves, or None if unknown.

    It is negative if sharing needs more GPUs than unshared GPUs.
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
    step = row.node_gpus / (study.unshared.gpus[0] or 1)
    return part_interval(saved, _reach(study, row), step)


def _reach(study: Study, row: Row) -> Reach | None:
    return wider(study.unshared.variation.reach, row.variation.reach)


def saved_month_cost(study: Study, row: Row, prices: Mapping[str, float]) -> tuple[int, int] | None:
    """Return the range of what ``row`` saves in a month, in the currency of ``prices``."""
    saved = [
        monthly(unshared.models, prices) - monthly(each.models, prices)
        for each, unshared in zip(row.figures, study.unshared.figures, strict=True)
        if each.gpus is not None and unshared.gpus is not None
    ]
    if not saved:
        return None
    reach = _reach(study, row)
    if reach and min(saved) <= 0 < max(saved):
        # Relative to a saving near 0, the range would be too narrow.
        return outward(*interval(saved))
    return outward(*saving_interval(saved, reach))
