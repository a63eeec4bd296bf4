"""Opens files below the root directory of another process, as that process sees them.

The kernel would resolve an absolute symbolic link from the agent's root. So this module follows
links itself. It opens each component of the path relative to its parent directory and lets the
kernel follow no link. ``..`` returns to a directory that is already open. So neither a link nor a
directory that is moved at the same time leads out of the root of the process. RESOLVE_IN_ROOT of
openat2 does the same, but older kernels and seccomp profiles do not support it.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Maximum number of symbolic links in a path, as in Linux.
_MOST_LINKS = 40
#: Maximum depth of a path. All directories of the path stay open until the file is found.
_MOST_LEVELS = 64
_MOST_SHOWN_CHARS = 200
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NULL = os.makedev(1, 3)


class Unreadable(OSError):
    """A file of another process cannot be read. The text is the same while the cause is the
    same."""


def read_inside(process: Path, path: str, most_bytes: int) -> tuple[tuple[int, int, int], bytes]:
    """Return a signature and the content of a file, at most ``most_bytes``.

    ``process`` is the directory of the process in /proc, and ``path`` is the path of the file as
    the process sees it. The signature changes when the file changes. The content of /dev/null is
    empty. Raises ``Unreadable``.
    """
    with _opened(process, path) as found:
        status = os.fstat(found)
        signature = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == _NULL:
            return signature, b""
        # Reading a pipe or a device might never end, and opening a device can have side effects.
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(f"{_shown(path)} is not a regular file")
        with _reasons(path), open(f"/proc/self/fd/{found}", "rb") as file:
            return signature, file.read(most_bytes)


def files_below(process: Path, path: str) -> Iterator[str]:
    """Yield the paths of all files below a directory, in the order of their names.

    Links to directories are not followed. The arguments are the same as for ``read_inside``. Raises
    ``Unreadable``.
    """
    for name, is_directory in _entries(process, path):
        if is_directory:
            yield from files_below(process, f"{path}/{name}")
        else:
            yield f"{path}/{name}"


def _entries(process: Path, path: str) -> list[tuple[str, bool]]:
    """Return (name, whether it is a directory) of each entry of a directory. Empty if the directory
    does not exist."""
    try:
        with (
            _opened(process, path) as found,
            _reasons(path),
            os.scandir(f"/proc/self/fd/{found}") as entries,
        ):
            return sorted((each.name, each.is_dir(follow_symlinks=False)) for each in entries)
    except Unreadable as err:
        if err.errno in (errno.ENOENT, errno.ENOTDIR):
            return []
        raise


@contextmanager
def _reasons(path: str) -> Iterator[None]:
    """Convert any ``OSError`` to ``Unreadable``."""
    try:
        yield
    except Unreadable:
        raise
    except OSError as err:
        why = f"{_shown(path)}: {os.strerror(err.errno or 0)}"
        raise _unreadable(err.errno, why) from err


def _unreadable(number: int | None, why: str) -> Unreadable:
    error = Unreadable(why)
    error.errno = number
    return error


@contextmanager
def _opened(process: Path, path: str) -> Iterator[int]:
    """Open a file or directory without reading it (O_PATH). Raises ``Unreadable``."""
    walk = _Walk(process, path)
    with _reasons(path):
        try:
            yield walk.end()
        finally:
            walk.close()


class _Walk:
    """One walk from the root of a process, or from its working directory, to a file."""

    def __init__(self, process: Path, path: str) -> None:
        self._process = process
        self._path = path
        #: The open directories from the root or the working directory down to the current one.
        self._open: list[int] = []
        self._is_from_root = False
        #: The remaining components of the path, in reverse order.
        self._todo: list[str] = []
        self._links = 0
        #: The first link of the path, and its target.
        self._link = ("", "")

    def end(self) -> int:
        """Return the file at the end of the path, open with O_PATH."""
        self._enter(self._path)
        while self._todo:
            self._step(self._todo.pop())
        return self._open[-1]

    def close(self) -> None:
        for each in self._open:
            os.close(each)
        self._open.clear()

    def _enter(self, path: str) -> None:
        """Continue with ``path``, from the root of the process if the path is absolute."""
        if path.startswith("/") or not self._open:
            self.close()
            self._is_from_root = path.startswith("/")
            base = "root" if self._is_from_root else "cwd"
            self._open.append(os.open(self._process / base, _DIRECTORY))
        self._todo += [part for part in reversed(path.split("/")) if part not in ("", ".")]

    def _step(self, part: str) -> None:
        if part == "..":
            if len(self._open) > 1:
                os.close(self._open.pop())
            elif not self._is_from_root:
                raise Unreadable(f"{_shown(self._path)} leads out of the working directory")
            return
        if len(self._open) > _MOST_LEVELS:
            raise Unreadable(f"{_shown(self._path)} has too many levels")
        try:
            found = os.open(part, _FILE, dir_fd=self._open[-1])
        except OSError as err:
            if err.errno == errno.ENOENT and self._link[0]:
                link, target = map(_shown, self._link)
                why = f"{_shown(self._path)}: the link {link} leads to {target}, which is missing"
                raise _unreadable(errno.ENOENT, why) from err
            raise
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            self._open.append(found)
            return
        try:
            target = os.readlink("", dir_fd=found)
        finally:
            os.close(found)
        self._links += 1
        if self._links > _MOST_LINKS:
            raise OSError(errno.ELOOP, "")
        self._link = self._link if self._link[0] else (part, target)
        self._enter(target)


def _shown(path: str) -> str:
    """Return a path for a message: without control characters, and truncated if it is long."""
    return ascii(path)[1:-1][:_MOST_SHOWN_CHARS]
