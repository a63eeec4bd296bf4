"""What a doctor finds: a sentence about nodes or a part of the configuration, and what helps.

Rules say things of one node at a time. Nodes of which the same is to be said are told of together,
so that texts name what is alike on all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

#: Names told of one finding; the others are counted.
NAMES = 5


class Weight(Enum):
    #: Pods are not placed, not protected or not admitted.
    WARNING = "warning"
    #: Memory lies idle that need not, or something could not be looked at.
    ADVICE = "advice"


@dataclass(frozen=True, slots=True)
class Finding:
    weight: Weight
    #: Names of nodes, in their order; or the part of a configuration that it is about.
    nodes: tuple[str, ...]
    found: str
    do: str


#: How much it weighs, what was found, and what to do.
Said = tuple[Weight, str, str]


def together(said: Mapping[Said, Sequence[str]]) -> list[Finding]:
    """``said`` of which nodes."""
    return [Finding(weight, tuple(names), *rest) for (weight, *rest), names in said.items()]


def warnings_first(found: Iterable[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: finding.weight is not Weight.WARNING)


def line(finding: Finding) -> str:
    """One finding for people."""
    names = ", ".join(finding.nodes[:NAMES])
    if (more := len(finding.nodes) - NAMES) > 0:
        names += f" and {more} more"
    where = f"{names}: " if names else ""
    return f"{finding.weight.value}: {where}{finding.found}. To do: {finding.do}."
