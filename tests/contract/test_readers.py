"""Checks that every field of a GPUNode, every setting and every annotation has a reader.

Readers are found by name, so the test misses an unread field if another field has the same name.
"""

import ast
from collections.abc import Iterator
from functools import cache

import msgspec

from headroom.contract import gpunode, keys
from headroom.runtime.settings.settings import Settings
from tests.controlplane import ROOT

#: Modules that only define fields and names.
DEFINITIONS = (
    "headroom/contract/gpunode.py",
    "headroom/contract/keys.py",
    "headroom/contract/annotations.py",
)
#: Fields that kubectl shows but that no program reads.
FOR_PEOPLE = {
    *("Summary.memory", "Summary.used", "Summary.free", "Summary.sharing"),
    *("GPUNodeSpec.reserved", "Condition.last_transition_time"),
}


@cache
def read_names() -> frozenset[str]:
    """Return all attributes, variables and strings that the product reads."""
    found: set[str] = set()
    for package in ("agent", "extender", "headroom"):
        for path in (ROOT / package).rglob("*.py"):
            if str(path.relative_to(ROOT)) not in DEFINITIONS:
                found.update(names_in(path.read_text()))
    return frozenset(found)


def names_in(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()) | ast.Name(id=name, ctx=ast.Load()):
                yield name
            case ast.Constant(value=str(name)):
                yield name


def test_only_loaded_names_count_as_read() -> None:
    text = "a.read; a.written = f(keyword=1); by_name = getattr(a, 'string')"
    assert set(names_in(text)) == {"a", "read", "f", "getattr", "string"}


def test_every_field_of_a_gpunode_is_read_or_shown() -> None:
    fields = {
        f"{name}.{field}"
        for name, struct in vars(gpunode).items()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        if struct.__module__ == gpunode.__name__
        for field in struct.__struct_fields__
    }
    unread = {each for each in fields if each.partition(".")[2] not in read_names()}
    assert len(fields) > 100
    assert unread - FOR_PEOPLE == set()
    assert fields >= FOR_PEOPLE


def test_every_setting_is_read() -> None:
    assert set(Settings.model_fields) - read_names() == set()


def test_every_annotation_is_used() -> None:
    defined = {
        name
        for name, value in vars(keys).items()
        if isinstance(value, str) and value.startswith(keys.PREFIX) and name != "PREFIX"
    }
    assert len(defined) == len(keys.KEYS)
    assert defined - read_names() == set()
