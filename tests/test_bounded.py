"""Every collection that grows with pods, requests or clients is listed with its bound in bytes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from extender.bounded import Bounded
from tests.controlplane import ROOT
from tests.growth import GROWS, MIB, Fixed
from tests.passing import PASSING

#: Commands that end by themselves, and the metrics, whose labels are few.
OTHERS = (
    *("extender/convert/", "extender/certs/", "extender/plan/"),
    *("extender/observability/metrics.py", "extender/observability/taint_metrics.py"),
)
MAKERS = {
    *("dict", "set", "frozenset", "list", "deque", "defaultdict", "Counter", "OrderedDict"),
    *("Bounded", "bytearray", "Queue", "WeakKeyDictionary", "WeakValueDictionary"),
}
#: The oldest entry goes: of a dictionary that forgets by hand.
FORGETS = re.compile(r"popitem\(last=False\)|del self\.\w+\[next\(iter\(")


def texts() -> dict[str, str]:
    files = sorted(Path(ROOT, "extender").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def grows(value: ast.expr | None) -> bool:
    """Return whether the value is a mutable collection."""
    if isinstance(value, ast.Dict | ast.List):
        return not ast.unparse(value).strip("{}[]")
    if isinstance(value, ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    if not isinstance(value, ast.Call):
        return False
    maker = ast.unparse(value.func).partition("[")[0].rpartition(".")[2]
    if maker == "field":
        made = (each.value for each in value.keywords if each.arg == "default_factory")
        return any(ast.unparse(each).partition("[")[0] in MAKERS for each in made)
    return maker in MAKERS


def assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign):
            yield from ((ast.unparse(target), statement.value) for target in statement.targets)
        elif isinstance(statement, ast.AnnAssign):
            yield ast.unparse(statement.target), statement.value


def found(text: str) -> Iterator[str]:
    """Return ``Class.attribute`` of each collection of an object or a module."""
    tree = ast.parse(text)
    for each in ast.walk(tree):
        if not isinstance(each, ast.ClassDef):
            continue
        for part in each.body:
            own = isinstance(part, ast.FunctionDef) and part.name == "__init__"
            for name, value in assigned(part) if own or isinstance(part, ast.AnnAssign) else ():
                if grows(value) and (not own or name.startswith("self.")):
                    yield f"{each.name}.{name.removeprefix('self.')}"
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            for name, value in assigned(statement):
                if isinstance(value, ast.Dict | ast.List) and grows(value):
                    yield f"<module>.{name}"


def test_every_growing_collection_is_listed() -> None:
    in_code = {path: sorted(found(text)) for path, text in texts().items()}
    in_code = {p: names for p, names in in_code.items() if names and not p.startswith(OTHERS)}
    listed = {
        path: sorted([*PASSING.get(path, ()), *GROWS.get(path, ())])
        for path in PASSING.keys() | GROWS.keys()
    }
    assert in_code == listed


def test_every_bounded_dictionary_has_a_fixed_bound_in_bytes() -> None:
    bounded = re.compile(r"self\.(\w+)\b[^\n]*= (?:Bounded|OrderedDict)\(")
    for path, text in texts().items():
        kinds = {name.rpartition(".")[2]: kind for name, kind in GROWS.get(path, {}).items()}
        for name in bounded.findall(text):
            assert name in kinds, f"{path}: {name}"


def test_fixed_bounds_fit_in_the_memory_limit() -> None:
    def fixed(*without: str) -> int:
        names = [
            names
            for path, names in GROWS.items()
            # The recorder has its own process.
            if path not in without and not path.startswith("extender/recorder/")
        ]
        every = [kind for each in names for kind in each.values()]
        return sum(kind.most_bytes for kind in every if isinstance(kind, Fixed))

    # The limit in deploy/base is 768 MiB for the extender, which follows no journal and records no
    # history. It is 896 MiB for the console, which writes no journal.
    of_the_console = "extender/observability/journal_follower.py", "extender/state/history.py"
    assert fixed(*of_the_console) < 512 * MIB
    assert fixed("extender/state/journal.py") < 640 * MIB


def test_bounded_dictionaries_use_the_common_class() -> None:
    forget = {path for path, text in texts().items() if FORGETS.search(text)}
    assert forget <= {"extender/bounded.py", "extender/scheduler/retry_spreading.py"}


def test_the_oldest_entries_are_evicted() -> None:
    kept = Bounded[str, int](2)
    for key in "abac":
        kept[key] = 1
    assert list(kept) == ["a", "c"]
    kept.trim(1)
    assert list(kept) == ["c"]
