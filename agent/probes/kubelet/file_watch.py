"""Watches a file for changes, with inotify and a check every second.

inotify only reports a change sooner. The check alone finds changes if inotify is not available (its
instances are limited per user), or if the directory is missing or was replaced.
"""

import ctypes
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

_log = structlog.get_logger()

LOOK_EVERY_S = 1.0

_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE_SELF = 0x8, 0x80, 0x100, 0x400
_EVENTS = _IN_CLOSE_WRITE | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE_SELF

_Signature = tuple[int, int, int]


@contextmanager
def watched(path: Path, changed: Callable[[], object]) -> Iterator[None]:
    """Call ``changed`` in another thread after each change of ``path``, until the context ends."""
    end_read, end_write = os.pipe()
    watch = threading.Thread(
        target=_watch, args=(path, _signature(path), changed, end_read), daemon=True
    )
    watch.start()
    try:
        yield
    finally:
        os.close(end_write)
        watch.join()
        os.close(end_read)


def _watch(path: Path, last: _Signature | None, changed: Callable[[], object], end: int) -> None:
    notify = _open()
    try:
        folder: _Signature | None = None
        while True:
            if notify is not None and (now := _signature(path.parent, content=False)) != folder:
                # A replaced directory has no watch yet. Adding a watch twice has no effect.
                folder = now if _add(notify, path.parent) else None
            waiting = [end] if notify is None else [end, notify]
            ready, _, _ = select.select(waiting, [], [], LOOK_EVERY_S)
            if end in ready:
                return
            if notify is not None and notify in ready:
                os.read(notify, 1 << 16)  # the check below finds out whether it was this file
            if (now := _signature(path)) != last:
                last = now
                changed()
    finally:
        if notify is not None:
            os.close(notify)


def _signature(path: Path, content: bool = True) -> _Signature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if content else (found.st_ino, 0, 0)


def _open() -> int | None:
    """Return an inotify descriptor; None if the kernel grants no more of them."""
    notify = int(_libc().inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if notify >= 0:
        return notify
    _log.warning("inotify_rejected", reason=os.strerror(ctypes.get_errno()), look_s=LOOK_EVERY_S)
    return None


def _add(notify: int, folder: Path) -> bool:
    return int(_libc().inotify_add_watch(notify, os.fsencode(folder), _EVENTS)) >= 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
