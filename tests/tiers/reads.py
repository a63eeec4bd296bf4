"""Records which files of the repository a test module reads, so that its declared inputs can be
checked.

A Python audit hook records the files that this process opens, the folders that it lists, and the
programs that it starts. It cannot detect the reads of other programs or of C libraries. Therefore a
Python program counts as reading all modules that it imports, and every program counts as reading
its arguments. A program that starts in another folder also counts as reading this folder. An
argument that is a folder counts as all files below it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.tiers.inputs import Repository

#: A read. It consists of an event and the event's arguments, with absolute paths.
Read = tuple[str, tuple[str, ...]]

_OWN = (__file__, str(Path(__file__).with_name("plugin.py")))
_IMPORTLIB = "<frozen importlib"
_sink: Callable[[Read], None] | None = None
_installed = False


def record(sink: Callable[[Read], None] | None) -> None:
    """Pass each read to ``sink`` until the next call of this function. None ends the recording."""
    global _sink, _installed
    if not _installed:
        sys.addaudithook(_hook)  # An audit hook cannot be removed.
        _installed = True
    _sink = sink


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if (sink := _sink) is not None and (handler := _HANDLERS.get(event)) is not None:
        for read in handler(event, arguments):
            sink(read)


def reader(root: Path) -> str | None:
    """Return the innermost file of the repository on the stack, except the files of this
    recording.
    """
    prefix, frame = f"{root}{os.sep}", sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(prefix) and "/site-packages/" not in name and name not in _OWN:
            return name.removeprefix(prefix)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _opened(_: str, arguments: tuple[Any, ...]) -> Iterator[Read]:
    if isinstance(arguments[0], str | bytes | os.PathLike):
        yield "file", (os.path.abspath(os.fsdecode(arguments[0])),)


def _listed(_: str, arguments: tuple[Any, ...]) -> Iterator[Read]:
    # Ignore the import system, which lists the folders of packages, because imports are inputs
    # anyway.
    caller = sys._getframe(2).f_code.co_filename
    path = arguments[0]
    if not caller.startswith(_IMPORTLIB) and (
        path is None or isinstance(path, str | bytes | os.PathLike)
    ):
        yield "folder", (os.path.abspath(os.fsdecode(path or ".")),)


def _started(_: str, arguments: tuple[Any, ...]) -> Iterator[Read]:
    _, command, folder, *_ = arguments
    words = [command] if isinstance(command, str | bytes | os.PathLike) else command
    here = os.getcwd()
    inside = os.path.abspath(os.fsdecode(folder)) if folder else here
    yield "program", (here, inside, *(os.fsdecode(each) for each in words))


def _executed(_: str, arguments: tuple[Any, ...]) -> Iterator[Read]:
    here = os.getcwd()
    yield "program", (here, here, *(os.fsdecode(each) for each in arguments[1]))


_HANDLERS: dict[str, Callable[[str, tuple[Any, ...]], Iterator[Read]]] = {
    "open": _opened,
    "os.listdir": _listed,
    "os.scandir": _listed,
    "subprocess.Popen": _started,
    "os.posix_spawn": _executed,
    "os.exec": _executed,
    # tests/forks.py
    "tests.forked": lambda _, arguments: iter([("module", (str(arguments[0]),))]),
}


def undeclared(repository: Repository, inputs: frozenset[str], reads: Iterable[Read]) -> list[str]:
    """Return the files of the repository that were read but are not inputs."""
    found = {each for read in reads for each in _files(repository, *read)}
    return sorted(found - inputs)


def _files(repository: Repository, kind: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the files of the repository that a read can depend on."""
    if kind == "file":
        yield from _file(repository, words[0])
    elif kind == "folder":
        if (inside := _inside(repository, words[0])) is not None:
            yield from (each for each in repository.files if str(Path(each).parent) == inside)
    elif kind == "module":
        yield from _python(repository, ("-m", *words))
    else:
        here, folder, *command = words
        if folder != here:
            yield from _below(repository, folder)
        for index, word in enumerate(command):
            if Path(word).name.startswith("python"):
                yield from _python(repository, command[index + 1 :])
            path = word.rpartition("=")[2]
            if "/" in path and "\n" not in path:
                path = os.path.join(folder, path)
                yield from _file(repository, path)
                yield from _below(repository, path)


def _inside(repository: Repository, path: str) -> str | None:
    """Return the path relative to the repository, or None if the path is outside."""
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath(repository.root)))
    except ValueError:
        return None


def _file(repository: Repository, path: str) -> Iterator[str]:
    # If the file is a link, yield both the link and its target.
    own = os.path.relpath(path, repository.root)
    for each in {own, _inside(repository, path) or own}:
        source = Path(each)
        if source.suffix == ".pyc":
            source = source.parent.parent / f"{source.name.partition('.')[0]}.py"
        if str(source) in repository.files:
            yield str(source)


def _below(repository: Repository, path: str) -> Iterator[str]:
    inside = _inside(repository, path)
    if inside is not None and os.path.isdir(path):
        prefix = "" if inside == "." else f"{inside}/"
        yield from (each for each in repository.files if each.startswith(prefix))


def _python(repository: Repository, words: Sequence[str]) -> Iterator[str]:
    """Yield the modules that Python imports when it starts with these arguments."""
    options = iter(words)
    for word in options:
        if word == "-m":
            name = next(options, "")
            main = [*repository.modules(name), *repository.modules(f"{name}.__main__")]
            yield from repository.closure(*main)
        elif word == "-c":
            yield from repository.closure(*repository.imported(next(options, "")))
        elif not word.startswith("-"):
            yield from repository.closure(*_file(repository, word))
        else:
            continue
        return
