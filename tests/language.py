"""Finds wording that is hard to understand in the product's files.

    python -m tests.language [FILE ...]      by default all files of the product

Prints one line for each finding: file, line, rule and text. In Python files it reads docstrings,
comments and messages (strings of at least three words). It reads whole manifests, the Makefile and
the Dockerfile. Text without findings can still be hard to read.
"""

import ast
import hashlib
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.gobin.build import default_cache

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ("agent", "benchmarks", "extender", "headroom", "reference", "tests")
#: Files that contain unwanted words on purpose are not checked.
EXCEPT = (":!tests/language.py", ":!tests/test_language.py")
OTHERS = ("deploy/*.yaml", "deploy/*.json", "Dockerfile", "Makefile")

#: Words that a docstring must not start with, because it must start with a verb or a noun.
OPENING = re.compile(r"(Of|Who|Whom|Whose|What|Where|That which)\b")
_OPENING_COMMENT = re.compile(rf"#[#: ]*{OPENING.pattern}")
#: Maps patterns of words to avoid to the words to write. vale checks the docs with the same table.
_TABLE = ROOT / ".vale/Headroom/Words.yml"
WORDS: dict[str, str] = yaml.safe_load(_TABLE.read_text())["swap"]
_WORDS = {re.compile(rf"\b({pattern})\b", re.IGNORECASE): use for pattern, use in WORDS.items()}
#: Matches if any pattern of ``_WORDS`` matches.
_ANY_WORD = re.compile("|".join(pattern.pattern for pattern in _WORDS), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def product_findings() -> list[Finding]:
    """Return the findings in the product.

    Skip files whose contents had no findings before, because parsing all files takes 6 s of CPU.
    The cache is outside the clone, like the cache of mypy.
    """
    cache = default_cache().parent / "files-without-findings"
    known = set(cache.read_text().split()) if cache.exists() else set()
    rules = hashlib.sha256(Path(__file__).read_bytes() + _TABLE.read_bytes())
    found, without = [], set()
    for path in product():
        digest = rules.copy()
        digest.update(path.suffix.encode() + path.read_bytes())
        if (name := digest.hexdigest()) not in known:
            found += (here := list(findings(path)))
            if here:
                continue
        without.add(name)
    if without != known:
        cache.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache.with_suffix(f".{os.getpid()}")
        unfinished.write_text("\n".join(sorted(without)))
        unfinished.replace(cache)
    return found


def findings(path: Path) -> Iterator[Finding]:
    """Yield the findings in one file, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    name = str(path.resolve().relative_to(ROOT))
    if path.suffix != ".py":
        for line, text in enumerate(source.splitlines(), 1):
            yield from _unwanted_words(name, line, text)
        return
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = set(_docstrings(nodes))
    for line, text in sorted({*docstrings, *_comments(source), *_messages(nodes, docstrings)}):
        documents = (line, text) in docstrings or text.startswith("#:")
        if documents and OPENING.match(text.lstrip("#: ")):
            yield Finding(name, line, "starts with a pronoun", text.split("\n")[0])
        yield from _unwanted_words(name, line, text)


def _unwanted_words(name: str, line: int, text: str) -> Iterator[Finding]:
    if not _ANY_WORD.search(text):
        return
    for pattern, use in _WORDS.items():
        for match in pattern.finditer(text):
            at = line + text[: match.start()].count("\n")
            yield Finding(name, at, f"write {use}", match[0])


def product() -> list[Path]:
    """Return the tracked files of the product that are checked."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *(f"{package}/*.py" for package in PYTHON), *OTHERS, *EXCEPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in nodes:
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def _comments(source: str) -> Iterator[tuple[int, str]]:
    if not any(map(_may_have_finding, source.splitlines())):
        return  # Avoid the tokenizer, which is slow.
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _may_have_finding(line: str) -> bool:
    """Return whether a comment in the line can have a finding."""
    return "#" in line and bool(_OPENING_COMMENT.search(line) or _ANY_WORD.search(line))


def _messages(
    nodes: Sequence[ast.AST], docstrings: Collection[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    """Yield strings of at least three words except docstrings. Yield the fixed parts of
    f-strings.
    """
    lines = {line for line, _ in docstrings}
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if node.lineno not in lines and len(node.value.split()) >= 3:
            yield node.lineno, node.value


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]]
    found = [each for path in paths for each in findings(path)] if paths else product_findings()
    for each in found:
        sys.stdout.write(f"{each}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
