"""Findings of the doctor. A finding is a problem with nodes or a configuration, and its fix.

Most rules examine one node. Nodes with the same finding are listed together, so the texts contain
only facts that all these nodes have in common.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

#: Maximum number of names in the text of a finding. Further names are only counted.
NAMES = 5


class Weight(Enum):
    #: Pods are not placed, not protected or not admitted.
    WARNING = "warning"
    #: Memory stays unused without need, or the doctor could not read something.
    ADVICE = "advice"


@dataclass(frozen=True, slots=True)
class Finding:
    weight: Weight
    #: Subject of the finding: sorted names of nodes or pods, or a part of a configuration. Empty if
    #: the finding is about the whole cluster or configuration.
    nodes: tuple[str, ...]
    found: str
    do: str


#: A finding without its nodes: (weight, what was found, what to do).
PartialFinding = tuple[Weight, str, str]


def with_nodes(nodes_of: Mapping[PartialFinding, Sequence[str]]) -> list[Finding]:
    """Return one finding for each key of ``nodes_of``, with the names of its nodes.

    If there is only one node, the word ``NAME`` in a command is replaced by the node's name.
    """
    return [
        Finding(
            weight,
            tuple(names),
            found,
            do.replace(" NAME", f" {names[0]}") if len(names) == 1 else do,
        )
        for (weight, found, do), names in nodes_of.items()
    ]


def warnings_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.weight is not Weight.WARNING)


def line(finding: Finding) -> str:
    """Return a finding as one line of text."""
    names = ", ".join(finding.nodes[:NAMES])
    if (more := len(finding.nodes) - NAMES) > 0:
        names += f" and {more} more"
    where = f"{names}: " if names else ""
    return f"{finding.weight.value}: {where}{finding.found}. To do: {finding.do}."
