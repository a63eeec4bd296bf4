"""``headroom copy-certs``: copies a mounted Secret to files on the host, and keeps them current."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import structlog
import typer

log = structlog.get_logger()

#: The certificate comes last. A client that reads between the writes of key and certificate finds
#: that they do not match, and reads again.
FILES = ("ca.crt", "tls.key", "tls.crt")
EVERY_S = 30.0


def copy_certs(
    source: Annotated[Path, typer.Argument(help="Directory in which the Secret is mounted.")],
    target: Annotated[Path, typer.Argument(help="Directory of the host.")],
    once: Annotated[bool, typer.Option("--once", help="Copy once, then exit.")] = False,
) -> None:
    """Copy ca.crt, tls.key and tls.crt, and copy them again whenever they change.

    This is for a kube-scheduler that runs as a static pod, which cannot mount a Secret. Each file
    is replaced atomically and is readable only by its owner. A file stays as it is while the Secret
    does not have it. The command runs until SIGTERM or SIGINT.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while True:
        failed = not copy(source, target)
        if once:
            raise typer.Exit(1 if failed else 0)
        if stop.wait(EVERY_S):
            return


def copy(source: Path, target: Path) -> bool:
    """Copy the files once. Return whether all copies are current; log the files that are not."""
    done = True
    for name in FILES:
        try:
            content = (source / name).read_bytes()
            copied = target / name
            if copied.exists() and copied.read_bytes() == content:
                continue
            temporary = target / f".{name}.new"
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)
            temporary.write_bytes(content)
            temporary.rename(copied)
            log.info("certificate_copied", file=str(copied))
        except OSError as err:
            log.warning("certificate_not_copied", file=name, message=str(err))
            done = False
    return done
