"""Chooses the number of GPUs to keep from the figures of a plan.

A range should contain the need of another such period in 9 of 10 cases. Its upper end is therefore
enough in at least as many cases. The need of the history itself is only the need of one period.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headroom.planner.study import Row, Study, best_row


@dataclass(frozen=True, slots=True)
class Choice:
    """The GPUs to keep for unshared or for shared GPUs."""

    #: unshared or shared
    name: str
    row: Row
    #: GPUs that the unchanged history needs.
    history_gpus: int
    #: GPUs that another such period should need in 9 of 10 cases; None if there is no range.
    gpus_range: tuple[int, int] | None
    today_gpus: int

    @property
    def keep_gpus(self) -> int:
        """The fewest GPUs that the figures support. At most today's number, unless even the low end
        of the range is above it."""
        if self.gpus_range is None:
            return self.history_gpus
        low, high = self.gpus_range
        return high if low > self.today_gpus else min(high, self.today_gpus)

    @property
    def text(self) -> str:
        today, needed = (
            self.today_gpus,
            f"the history needed {_gpus(self.history_gpus)} {self.name}",
        )
        if self.gpus_range is None:
            return (
                f"{needed}, so keep at least {self.history_gpus:,}; how many more another period "
                "needs is unknown, because there is no range"
            )
        low, high = self.gpus_range
        if low > today:
            keep = f"plan for {high:,}, because today's {today:,} are probably too few"
        elif high > today:
            keep = f"keep all of today's {today:,}, which can be too few"
        elif high == today:
            keep = f"keep all of today's {today:,}"
        else:
            keep = f"keep at least {high:,}, {today - high:,} fewer than today's {today:,}"
        another = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"{needed}, and another such period should need {another} in 9 of 10 cases: {keep}"


def decision(study: Study) -> Iterator[str]:
    """Yield the sentence that states how many GPUs to keep, or nothing if no number suffices."""
    found = choices(study)
    if not found:
        return
    texts = [f"{each.text[0].upper()}{each.text[1:]}." for each in found]
    best = best_row(study.rows)
    if best is not None and not saves(study, best):
        texts.append(
            "Do not give GPUs back because of sharing: in at least one replay, "
            + ("pods run out of memory." if best.loses_pods else "it saves no GPU.")
        )
    yield " ".join(texts)


def choices(study: Study) -> list[Choice]:
    """Return the choice for unshared GPUs and, if sharing saves GPUs in each replay, the choice for
    the best configuration with shared GPUs."""
    best = best_row(study.rows)
    rows = {"unshared": study.unshared}
    if best is not None and saves(study, best):
        rows["shared"] = best
    return [
        Choice(
            name,
            row,
            needed,
            None if row.variation.missing else row.gpus_ends,
            study.history.gpus,
        )
        for name, row in rows.items()
        if (needed := row.gpus[0]) is not None and row.gpus_ends is not None
    ]


def saves(study: Study, row: Row) -> bool:
    """Return whether a configuration needs fewer GPUs than unshared GPUs in each replay, and no pod
    runs out of memory."""
    return not row.loses_pods and all(
        gpus is not None and (unshared is None or gpus < unshared)
        for gpus, unshared in zip(row.gpus, study.unshared.gpus, strict=True)
    )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"
