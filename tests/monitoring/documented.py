"""Parses the tables of docs/reference/metrics.md."""

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs/reference/metrics.md"
_ROW = re.compile(
    r"^\| `(?P<name>\w+)` \| (?P<type>\w+) \| (?P<labels>[^|]+)"
    r" \| [^|]+ \| (?P<alerts>.+) \|$",
    re.MULTILINE,
)
_DEVICE = {"gpu", "UUID", "Hostname", "model_name", "GPU_I_ID", "GPU_I_PROFILE"}
_STANDS_FOR = {
    "*device*": _DEVICE,
    "*pod*": _DEVICE | {"namespace", "pod", "container", "pod_uid"},
    "-": set[str](),
}


@dataclass(frozen=True, slots=True)
class Documented:
    type: str
    labels: frozenset[str]
    alerts: frozenset[str]


def documented(section: str = "") -> dict[str, Documented]:
    """Return the documentation of each metric in one section, or on the whole page."""
    text = DOCS.read_text()
    if section:
        (text,) = (part for part in text.split("\n## ") if part.startswith(f"{section}\n"))
    return {
        row["name"]: Documented(
            row["type"],
            frozenset().union(*(_STANDS_FOR.get(w, {w}) for w in row["labels"].split(", "))),
            frozenset(re.findall(r"`(\w+)`", row["alerts"])),
        )
        for row in _ROW.finditer(text)
    }
