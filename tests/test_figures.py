"""Checks that the design notes name a command and a date for every table of measured figures.

The commands must exist.
"""

import re

from tests.controlplane import ROOT
from tests.test_site import FENCE

TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
#: Matches a number with a unit in a cell, or a unit in the heading of a column.
FIGURE = re.compile(
    r"\d (?:%|ms|s|us|µs|[KMG]iB)(?![\w/])|^\|.*(?:, (?:ms|s)\b|%|[KMG]iB).*\n\|[-| ]+\n.*\d",
    re.MULTILINE,
)
DATE = re.compile(r"\b2026-\d\d-\d\d\b")
COMMAND = re.compile(r"python -m [a-z]|\bmake [a-z-]+|\bpytest tests/|\bheadroom plan ")
#: Matches a module to run, a test file, or a make target.
NAMED = re.compile(
    r"python -m ((?:benchmarks|tests)[\w.]*\w)|\b((?:tests|benchmarks)/[\w/]+\.py)\b"
    r"|(?:`|^ {4}|^)make ([a-z][a-z-]*)",
    re.MULTILINE,
)
TARGETS = frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
#: Sections whose figures are settings, limits or examples and not results of a run.
NOT_MEASURED = {
    ("admission.md", "Errors and warnings"): "texts that tests compare with the webhook's",
    ("admission.md", "Limits on one pod"): "limits of the webhook",
    ("agent.md", "When something fails"): "texts that tests compare with the agent's",
    ("api-load.md", "Writes"): "calls and reports, which tests count",
    ("chaos.md", "Faults"): "durations of the faults, as set",
    ("doctor.md", "Checks of the doctor"): "limits of the doctor's rules",
    ("gpu-check.md", "Lines of the GPU check"): "goals",
    ("kube-scheduler.md", "Pods without a GPU"): "timeouts",
    ("security.md", "Evictions"): "limits of evictions",
    ("security.md", "Ports"): "limits of connections and requests",
    ("sm-activity.md", "Sources that why names"): "the maximum age of a sample",
    ("sm-activity.md", "If Prometheus fails"): "limits of an answer",
}


def sections(page: str) -> list[tuple[str, str, str]]:
    """Return the title of each section, its text, and its text together with the enclosing
    sections.
    """
    unquoted = FENCE.sub(lambda code: re.sub(r"(?m)^[#|]", " ", code[0]), page)
    parts = re.split(r"^(#+) (.+)\n", unquoted, flags=re.MULTILINE)
    around: dict[int, str] = {}
    found = []
    for marks, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        around = {level: each for level, each in around.items() if level < len(marks)}
        around[len(marks)] = text
        found.append((title, text, "".join(around.values())))
    return found


def untraceable(page: str) -> list[str]:
    """Return the sections with measured tables that lack a command or a date."""
    return [
        title
        for title, text, context in sections(page)
        if any(FIGURE.search(CODE.sub("", table)) for table in TABLE.findall(text))
        and not (DATE.search(context) and COMMAND.search(context))
    ]


def missing(page: str) -> list[str]:
    """Return the modules, files and make targets that the page names but that do not exist."""
    found = []
    for module, file, target in NAMED.findall(page):
        path = module.replace(".", "/")
        files = [file] if file else [f"{path}.py", f"{path}/__main__.py"]
        if target not in TARGETS if target else not any((ROOT / each).exists() for each in files):
            found.append(module or file or target)
    return found


def test_each_table_of_figures_has_a_command_and_a_date() -> None:
    notes = sorted((ROOT / "docs/design").glob("*.md"))
    found = {(note.name, title) for note in notes for title in untraceable(note.read_text())}
    assert found == set(NOT_MEASURED)
    assert {note.name: named for note in notes if (named := missing(note.read_text()))} == {}


def test_tables_without_a_command_or_a_date_are_reported() -> None:
    table = "| nodes | p50 |\n|---|---|\n| 100 | 1.8 ms |\n"
    run = "Run on 2026-11-26 with `python -m benchmarks.page`:\n\n"
    heading = "| nodes | p50, ms |\n|---|---|\n| 100 | 1.8 |\n"
    assert untraceable(f"# Page\n\n{run}## A\n\n{table}") == []
    assert untraceable(f"# Page\n\n## A\n\n{run}## B\n\n{table}") == ["B"]
    assert untraceable(f"# Page\n\n## A\n\nmake bench:\n\n{heading}") == ["A"]
    assert untraceable(f"# Page\n\n## A\n\n2026-11-26:\n\n{heading}") == ["A"]
    assert untraceable(f"# Page\n\n## A\n\n{table.replace('1.8 ms', '`1.8 ms`')}") == []


def test_missing_commands_are_reported() -> None:
    named = "`make bench`, `python -m benchmarks.packing --churn`, tests/test_figures.py"
    assert missing(named) == []
    gone = "`make banch`, `python -m benchmarks.packings`, tests/test_figure.py"
    assert missing(gone) == ["banch", "benchmarks.packings", "tests/test_figure.py"]
