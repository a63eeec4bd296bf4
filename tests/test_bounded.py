"""What grows with pods, requests or clients is one class, in one list."""

import re
from pathlib import Path

from extender.bounded import Bounded
from tests.controlplane import ROOT

#: Bounded in entries.
ENTRIES = {
    "extender/cluster/departures.py": ["_seen"],
    "extender/journal.py": ["_preempted", "_schedulers"],
    "extender/placement/mix.py": ["_offered", "_seen"],
    "extender/placement/weighing.py": ["_held"],
    "extender/web/auth.py": ["_kept"],
    "extender/web/coming.py": ["_answers", "_expected"],
    "extender/web/pace.py": ["_tried"],
    "extender/web/verbs.py": ["_turned_away"],
    "extender/wiring/announcing.py": ["_told"],
    "extender/wiring/preempting.py": ["_not_before_s", "_told"],
    "extender/wiring/watching.py": ["_told"],
}
#: Bounded in bytes, each in a way of its own.
BYTES = {"extender/journal.py": ["_by_uid"], "extender/records.py": ["_records"]}

BY_ENTRIES = re.compile(r"self\.(\w+)\b[^\n]*= Bounded\(")
BY_HAND = re.compile(r"self\.(\w+)\b[^\n]*= OrderedDict\(")
#: The oldest entry goes: of a dictionary that forgets by hand.
FORGETS = re.compile(r"popitem\(last=False\)|del self\.\w+\[next\(iter\(")


def found(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    files = Path(ROOT, "extender").rglob("*.py")
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    every = {path: sorted(pattern.findall(text)) for path, text in texts.items()}
    return {path: names for path, names in every.items() if names}


def test_every_bounded_dictionary_is_in_the_list() -> None:
    assert found(BY_ENTRIES) == ENTRIES
    assert found(BY_HAND) == BYTES


def test_no_dictionary_forgets_by_hand() -> None:
    assert set(found(FORGETS)) <= {"extender/bounded.py", "extender/web/pace.py"}


def test_the_entries_written_longest_ago_are_forgotten() -> None:
    kept = Bounded[str, int](2)
    for key in "abac":
        kept[key] = 1
    assert list(kept) == ["a", "c"]
    kept.trim(1)
    assert list(kept) == ["c"]
