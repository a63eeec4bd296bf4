"""Runs mutation tests: changes the product in one place at a time and runs the quick tests that use
the place.

    python -m tests.mutation --seed 1 --count 40
    python -m tests.mutation --seed 1 --count 40 --only 7

The seed selects the places at random, each with the same probability. For each mutant, the quick
tests that import the mutated module run first, and then all other quick tests, until a test fails.
If no test fails, the mutant is printed with its line. Read the line, and write a test if the
difference matters. Mutants are made in a copy, so the working tree does not change. The exit status
is the number of mutants that no test detects.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
PACKAGES = ("agent", "extender", "headroom")
#: Files that are not copied, because tests do not need them.
LEFT_OUT = (".venv", ".*_cache", ".hypothesis", "__pycache__")
TIMEOUT_S = 1800.0
#: More test files than this run on two workers.
SEVERAL = 8
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change that replaces the bytes from ``begin`` to ``end`` in the file with ``becomes``."""

    file: str
    line: int
    begin: int
    end: int
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {_short(self.was)} -> {_short(self.becomes)}"

    @property
    def module(self) -> str:
        parts = Path(self.file).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _short(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) < 90 else f"{text[:87]}..."


def _replacement(node: ast.AST) -> str | None:
    """Return mutated code for the node, or None if the node cannot be mutated."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            other = ast.Compare(node.left, [_SWAPS[type(op)]()], node.comparators)  # type: ignore[list-item]
            return f"({ast.unparse(other)})"
        case ast.BoolOp():
            return f"({ast.unparse(ast.BoolOp(_SWAPS[type(node.op)](), node.values))})"  # type: ignore[arg-type]
        case ast.BinOp() if type(node.op) in _SWAPS and not _is_text(node):
            other_op = _SWAPS[type(node.op)]()
            return f"({ast.unparse(ast.BinOp(node.left, other_op, node.right))})"  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not()):
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool()):
            return str(not node.value)
        case ast.Constant(value=int() | float()):
            return f"({node.value!r} + 1)"
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            return "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            return "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
    return None


def _is_text(node: ast.BinOp) -> bool:
    """Return whether the operation concatenates strings. It is not mutated, because strings support
    no other operator.
    """
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str | bytes))
        for each in (node.left, node.right)
    )


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below this node, except annotations and the parts of f-strings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from _nodes(child)


def mutants_of(file: str, source: bytes) -> Iterator[Mutant]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _nodes(ast.parse(source)):
        if (becomes := _replacement(node)) is None:
            continue
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        yield Mutant(file, node.lineno, begin, end, source[begin:end].decode(), becomes)


def drawn(seed: int, count: int) -> list[Mutant]:
    files = sorted(path for each in PACKAGES for path in (ROOT / each).rglob("*.py"))
    everything = [
        mutant
        for path in files
        for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())
    ]
    return random.Random(seed).sample(everything, count)


def tests_of(module: str, imports: grimp.ImportGraph) -> list[list[str]]:
    """Return groups of test files, the nearest first: the files that import the module, the files
    that import it through other modules, and all other files, because they can start a program that
    uses it.
    """
    tests = {
        f"tests.{'.'.join(path.relative_to(TESTS).with_suffix('').parts)}": str(
            path.relative_to(ROOT)
        )
        for path in sorted(TESTS.rglob("test_*.py"))
    }
    direct = imports.find_modules_that_directly_import(module) & tests.keys()
    indirect = imports.find_downstream_modules(module) & tests.keys() - direct
    others = tests.keys() - direct - indirect
    return [sorted(tests[each] for each in group) for group in (direct, indirect, others)]


def killer(mutant: Mutant, copy: Path, imports: grimp.ImportGraph) -> str | None:
    """Return the first test that fails with the mutant, "timeout" after the time limit, or None if
    no test fails.
    """
    path = copy / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.begin] + mutant.becomes.encode() + source[mutant.end :])
    try:
        for files in filter(None, tests_of(mutant.module, imports)):
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            command += ["-n", "2", "--dist", "loadfile"] if len(files) > SEVERAL else []
            command += ["-m", "not slow", "--no-header", *files]
            try:
                done = subprocess.run(
                    command,
                    cwd=copy,
                    env=os.environ | {"TEST_QUICK": "1"},
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "timeout"
            if done.returncode not in (0, 5):  # 5 means that there is no quick test.
                failed = [
                    x
                    for x in done.stdout.splitlines()
                    if x.startswith(("FAILED tests", "ERROR tests"))
                ]
                return (failed or [done.stdout[-300:] + done.stderr[-300:]])[0]
        return None
    finally:
        path.write_bytes(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", type=int, help="only the mutant of this number, from 0")
    args = parser.parse_args()
    survivors = 0
    imports = grimp.build_graph(*PACKAGES, "tests", cache_dir=None)
    with tempfile.TemporaryDirectory(prefix="headroom-mutation-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        for number, mutant in enumerate(drawn(args.seed, args.count)):
            if args.only not in (None, number):
                continue
            began_s = time.monotonic()
            found = killer(mutant, copy, imports)
            survivors += found is None
            verdict = "SURVIVED" if found is None else f"killed by {_short(found)}"
            took_s = time.monotonic() - began_s
            sys.stdout.write(f"{number:3} {mutant}\n    {verdict} ({took_s:.0f} s)\n")
            sys.stdout.flush()
    sys.stdout.write(f"{survivors} of {args.count if args.only is None else 1} survived\n")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
