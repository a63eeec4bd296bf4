"""Facts that several pages of the docs and README state, each with its one source.

``tests/test_facts.py`` compares every page for users with this table. To change a fact, change its
source, or the value here if there is no other source, and then each page that the test names.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.settings import FLAGS
from headroom.contract.device_choice import FIRST_UNSTEERED
from headroom.runtime.settings.settings import Settings
from reference.markdown import ROOT
from tests.gobin.kubernetes import VERSIONS, minor_of


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    #: Each group of a match must be equal to the value in the same place.
    pattern: re.Pattern[str]
    values: tuple[str, ...]
    #: Pages of docs/ that must state the fact; README.md is "../README.md".
    pages: tuple[str, ...]


def _fact(name: str, pattern: str, *values: object, pages: tuple[str, ...]) -> Fact:
    # A space also matches the end of a line.
    compiled = re.compile(pattern.replace(" ", r"\s+"))
    return Fact(name, compiled, tuple(map(str, values)), pages)


def _default(setting: str) -> str:
    """Return the default of a setting of the extender, as pages write it."""
    value = Settings.model_fields[setting].default
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _recorded() -> Iterator[tuple[str, str]]:
    """Yield driver and model of each real GPU of which tests have recordings."""
    for folder in sorted((ROOT / "tests/recorded/gpu").iterdir()):
        if folder.is_dir():
            driver, model, *_ = folder.name.split("-")
            yield ".".join(driver.split(".")[:2]), model.upper()


def recorded_models() -> set[str]:
    return {model for _, model in _recorded()}


README = "../README.md"
FAQ = "concepts/faq.md"
CHOICE = "concepts/device-choice.md"
_UNSTEERED = ".".join(map(str, FIRST_UNSTEERED))
(_DRIVER,) = {driver for driver, _ in _recorded()}
_INTERVAL_S = next(flag.default for flag in FLAGS if flag.flag == "interval")
_MINORS = sorted((minor_of(each) for each in VERSIONS), key=lambda each: int(each.split(".")[1]))

FACTS = (
    # The versions of other projects that the comparison describes.
    _fact("HAMi", r"HAMi v?(\d+\.\d+)", "2.10", pages=("concepts/comparison.md",)),
    _fact("KAI", r"KAI v?(\d+\.\d+)", "0.18", pages=("concepts/comparison.md",)),
    _fact("Volcano", r"Volcano v?(\d+\.\d+)", "1.15", pages=("concepts/comparison.md",)),
    _fact("Kueue", r"Kueue v?(\d+\.\d+)", "0.19", pages=(README, "concepts/comparison.md")),
    _fact("GPU Operator", r"GPU Operator v?(\d+\.\d+)", "26.7", pages=("concepts/comparison.md",)),
    _fact(
        "NVIDIA's DRA driver",
        r"(?:alpha in|DRA) driver v?(\d+\.\d+)",
        "0.5",
        pages=(README, "concepts/comparison.md"),
    ),
    # Versions that have run on real GPUs.
    _fact("driver of the real GPUs", r"(\d{3}\.\d{3})\b(?!\.)", _DRIVER, pages=(README, FAQ)),
    _fact("plugin on real GPUs", r"plugin[ |]+(0\.19\.\d+)", "0.19.3", pages=(README, FAQ)),
    # Supported versions.
    _fact(
        "kubelets that can be steered",
        r"kubelets? (?:older than|from|must be older than|is older than|of) (1\.\d+)",
        _UNSTEERED,
        pages=(CHOICE, "get-started/rollout.md", "how-to/one-pool.md", "operate/alerts.md"),
    ),
    _fact(
        "kubelets that cannot be steered",
        r"kubelet (1\.\d+) or newer are not",
        _UNSTEERED,
        pages=(README,),
    ),
    _fact(
        "versions of Kubernetes",
        r"Kubernetes (1\.\d+) or newer",
        _MINORS[0],
        pages=("get-started/helm.md",),
    ),
    # Defaults.
    _fact(
        "stale reports",
        r"[Aa]fter (\d+) s(?: without a report|: `GPU report|; at once)",
        _default("stale_after_s"),
        pages=("operate/agent.md", "operate/troubleshooting.md"),
    ),
    _fact(
        "grace of overuse",
        r"`overuse_grace_s` \((\S+) s\)",
        _default("overuse_grace_s"),
        pages=("how-to/overuse.md", "how-to/bursts.md"),
    ),
    _fact(
        "hold of a nomination",
        r"until (\d+) s \(`nomination_hold_s`\)",
        _default("nomination_hold_s"),
        pages=("concepts/preemption.md",),
    ),
    _fact(
        "interval of the agent",
        r"[Ee]very (\d+) s (?:the agent|it measures)",
        _INTERVAL_S,
        pages=("concepts/how-it-works.md", "operate/agent.md"),
    ),
    # Measured figures. Commands: make demo; benchmarks.surprises; make bench-devices; make bench.
    _fact("deaths in the demo", r"(\d+) of (2,000) pods die", 199, "2,000", pages=(README,)),
    _fact(
        "causes of these deaths", r"(\d+) of them[^|]*?other (\d+) die", 160, 39, pages=(README,)
    ),
    _fact("misses", r"(\d+) of ([\d,]+) admissions", 3, "1,000", pages=(README, FAQ)),
    _fact("overcommitted, counting", r"\((\d+) of (192)\)", 187, 192, pages=(CHOICE,)),
    _fact("overcommitted, predicted", r"(\d+) of (192) GPUs over", 3, 192, pages=(CHOICE,)),
    _fact(
        "cost of the agent",
        r"(\d+) MiB and (\d+) % of (?:a|one) core(?! with 8)",
        80,
        3,
        pages=(FAQ, "operate/agent.md"),
    ),
)


def contradictions(pages: Mapping[str, str]) -> list[str]:
    """Return what pages (path below docs/ -> text) state differently than their source."""
    found = []
    for fact in FACTS:
        for page, text in pages.items():
            stated = [match.groups() for match in fact.pattern.finditer(text)]
            found += [
                f"{page}: {fact.name}: {', '.join(each)} instead of {', '.join(fact.values)}"
                for each in stated
                if each != fact.values
            ]
            if page in fact.pages and not stated:
                found.append(f"{page}: {fact.name} is missing")
    return found


def memory_used(note: str) -> dict[str, str]:
    """Return the share of memory that pods use with each device choice, from the measurements."""
    rows = ([cell.strip() for cell in line.split("|")] for line in note.splitlines() if "±" in line)
    found = {row[1].partition(",")[0]: row[4].split()[0] for row in rows if len(row) > 5}
    return {name: share for name, share in found.items() if re.fullmatch(r"[\d.]+", share)}


def read(folder: Path = ROOT) -> dict[str, str]:
    """Return the pages for users, by their path below docs/: all pages except design notes and
    generated ones."""
    texts = {
        str(page.relative_to(folder / "docs")): page.read_text(encoding="utf-8")
        for page in sorted((folder / "docs").rglob("*.md"))
        if "design" not in page.parts
    }
    pages = {name: text for name, text in texts.items() if "Generated by `make docs`" not in text}
    return {README: (folder / "README.md").read_text(encoding="utf-8"), **pages}
