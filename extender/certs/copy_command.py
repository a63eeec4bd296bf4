"""``headroom copy-certs``: keeps files on a host as a mounted Secret has them."""

import signal
import threading
from pathlib import Path
from typing import Annotated

import structlog
import typer

log = structlog.get_logger()

#: Certificate and key are two files: who reads between the two finds the key of another one, and
#: reads again.
FILES = ("ca.crt", "tls.key", "tls.crt")
EVERY_S = 30.0


def copy_certs(
    source: Annotated[Path, typer.Argument(help="Where the Secret is mounted.")],
    target: Annotated[Path, typer.Argument(help="Folder of the host.")],
    once: Annotated[bool, typer.Option("--once", help="Do it once, and end.")] = False,
) -> None:
    """Copy ca.crt, tls.key and tls.crt, again whenever they change, until a signal.

    For a kube-scheduler that is a static pod, which cannot mount a Secret. Each file is replaced
    whole, is its owner's alone, and stays as it is while there is none to copy.
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
    """Whether all are there now; what is not is logged."""
    done = True
    for name in FILES:
        try:
            content = (source / name).read_bytes()
            there = target / name
            if there.exists() and there.read_bytes() == content:
                continue
            half = target / f".{name}.new"
            half.unlink(missing_ok=True)
            half.touch(mode=0o600)
            half.write_bytes(content)
            half.rename(there)
            log.info("certificate_copied", file=str(there))
        except OSError as err:
            log.warning("certificate_not_copied", file=name, message=str(err))
            done = False
    return done
