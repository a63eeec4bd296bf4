"""Records which files of the repository a test module reads, because they are its inputs.

A Python audit hook records the files that this process opens, the folders that it lists, and the
programs that it starts. It cannot detect the reads of other programs or of C libraries. Therefore
every program counts as reading its arguments, and all files below an argument that is a folder. A
program that starts in a folder of the repository also counts as reading all files below it, unless
it is one of ``ONLY_ARGUMENTS``. A shell counts as reading all files. A Python program counts as
reading all modules that it imports and all files of the product, or of its own packages if it is a
program of Headroom.

Neither a program's own folder nor the product counts for modules in ``DECLARED``, which declares
what their programs read.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.tiers.inputs import BINARIES, MANIFESTS, PRODUCT, Repository

#: A read. It consists of an event and the event's arguments, with absolute paths.
Read = tuple[str, tuple[str, ...]]

#: Programs that read no file of the folder in which they start, except for their arguments.
ONLY_ARGUMENTS = {
    *("chrome", "containerd", "etcd", "gcc", "cc", "helm", "ip", "kube-apiserver", "kubectl"),
    *("kubelet", "mount", "node", "openssl", "promtool", "sleep", "true", "umount"),
}
#: Maps each program of Headroom to the files of its packages. It reads no others, except for its
#: arguments.
OWN = {"agent": ("agent/*",), "headroom": ("headroom/*", "extender/*")}
#: The program that builds the binaries.
BUILD = "tests/gobin/build.py"

_OWN = (__file__, str(Path(__file__).with_name("plugin.py")))
_IMPORTLIB = "<frozen importlib"


Sink = Callable[[Read], None]
_sink: Sink | None = None
_installed = False


def record(sink: Sink | None) -> Sink | None:
    """Pass each read to ``sink`` until the next call of this function. None ends the recording.
    Return the sink that was used before.
    """
    global _sink, _installed
    if not _installed:
        sys.addaudithook(_hook)  # An audit hook cannot be removed.
        _installed = True
    before, _sink = _sink, sink
    return before


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if (sink := _sink) is not None and (handler := _HANDLERS.get(event)) is not None:
        for read in handler(event, arguments):
            sink(read)


def readers(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield the files of the repository on the stack, innermost first, except the files of this
    recording, and whether the function on the stack has a cache.
    """
    prefix, frame = f"{root}{os.sep}", sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(prefix) and "/site-packages/" not in name and name not in _OWN:
            yield name.removeprefix(prefix), _has_cache(frame)
        frame = frame.f_back  # type: ignore[assignment]


def _has_cache(frame: FrameType) -> bool:
    """Return whether ``functools.cache`` wraps the function of a frame."""
    found: Any = None
    above: Any = frame.f_globals
    for name in frame.f_code.co_qualname.split("."):
        found = above.get(name)
        above = getattr(found, "__dict__", {})
    return isinstance(found, functools._lru_cache_wrapper)


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


def _forked(_: str, __: tuple[Any, ...]) -> Iterator[Read]:
    # The child can read any file.
    here = os.getcwd()
    yield "program", (here, here, "fork")


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
    "os.fork": _forked,
    "os.forkpty": _forked,
    # tests/forks.py
    "tests.forked": lambda _, arguments: iter([("module", tuple(map(str, arguments)))]),
}


def patterns(repository: Repository, reads: Iterable[Read]) -> list[str]:
    """Return what was read as patterns of inputs (tests/tiers/inputs.py). A question mark precedes
    those that do not apply to modules in ``DECLARED``.
    """
    return sorted({each for read in reads for each in _patterns(repository, *read)})


def _patterns(repository: Repository, kind: str, words: Sequence[str]) -> Iterator[str]:
    if kind == "file":
        yield from _file(repository, words[0])
    elif kind == "folder":
        if (inside := _inside(repository, words[0])) is not None:
            yield f"{inside}/"
    elif kind == "module":
        module, *arguments = words
        yield from _python(repository, ("-m", module))
        yield from _arguments(repository, "/", arguments)
    else:
        here, folder, *command = words
        if any(word.endswith(f"/{BUILD}") for word in command):
            yield BINARIES  # These programs depend on nothing else.
            return
        name = Path(command[0]).name
        if name in ("bash", "sh"):
            yield "?*"  # Its commands can read any file.
        is_own = command[1:2] == ["-m"] and "".join(command[2:3]).partition(".")[0] in OWN
        if name not in ONLY_ARGUMENTS and not is_own:
            yield from (
                f"{'?' if folder == here else ''}{each}" for each in _below(repository, folder)
            )
        for index, word in enumerate(command):
            if Path(word).name.startswith("python"):
                yield from _python(repository, command[index + 1 :])
        yield from _arguments(repository, folder, command)


def _arguments(repository: Repository, folder: str, words: Sequence[str]) -> Iterator[str]:
    for word in words:
        path = word.rpartition("=")[2]
        if "/" in path and "\n" not in path:
            path = os.path.join(folder, path)
            yield from _file(repository, path)
            yield from _below(repository, path)
            # Kustomizations refer to other folders of the manifests.
            if (_inside(repository, path) or "").startswith("deploy/"):
                yield MANIFESTS


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
        yield "*" if inside == "." else f"{inside}/*"


def _python(repository: Repository, words: Sequence[str]) -> Iterator[str]:
    """Yield what Python reads when it starts with these arguments. A program of Headroom reads the
    files of its own packages. Other programs may run any program of Headroom.
    """
    options = iter(words)
    for word in options:
        if word == "-m":
            name = next(options, "")
            yield f"-m {name}"
            yield from (f"?{each}" for each in OWN.get(name.partition(".")[0], PRODUCT))
            return
        if word == "-c" or not word.startswith("-"):
            source = next(options, "") if word == "-c" else ""
            own_files = repository.imported(source) if word == "-c" else _file(repository, word)
            yield from repository.closure(*own_files)
            break
    yield from (f"?{each}" for each in PRODUCT)
