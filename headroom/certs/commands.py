"""``headroom certs``: creates and renews the certificates of a cluster without cert-manager."""

import signal
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import structlog
import typer

from headroom.errors import BadSettings, StoreConflict


def certs(
    namespace: Annotated[
        str, typer.Option(help="Namespace of the Secrets and Services.")
    ] = "headroom-system",
    name: Annotated[
        list[str] | None,
        typer.Option(help="Additional DNS name or IP address of all servers; may be repeated."),
    ] = None,
    leaf_days: Annotated[
        float, typer.Option(min=0.001, max=398, help="Lifetime of certificates, in days.")
    ] = 90,
    leaf_renew_days: Annotated[
        float, typer.Option(min=0, help="Renew a certificate this many days before it expires.")
    ] = 30,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Only renew certificates; create no CA and no Secret."),
    ] = False,
    ca_days: Annotated[
        float, typer.Option(min=0.001, max=36_500, help="Lifetime of CA certificates, in days.")
    ] = 3650,
) -> None:
    """Create missing certificates, and renew certificates that expire soon.

    Run it as a Job when Headroom is installed, and with --renew every day as a CronJob. A run
    changes nothing if all certificates are valid. It writes Secret headroom-ca, a Secret
    headroom-PART-tls for each part that serves TLS, Secret headroom-scheduler-client, and the
    caBundle of the webhook configurations headroom. With --renew, it writes only certificates, and
    only into existing Secrets. It prints each change. The exit status is 1 if a later run may
    succeed, and 2 if the options or Secrets must be fixed first.
    """
    try:
        # The client for the API server is an optional dependency, and slow to import.
        from headroom.certs.cluster_secrets import Certificates, wanted
        from headroom.certs.pki import Terms
        from headroom.runtime.kube.api_errors import ApiError
        from headroom.runtime.kube.client import KubeApi, load_configuration
    except ImportError as err:
        typer.echo(f"headroom: {err}; install it: pip install 'headroom-gpu[extender]'", err=True)
        raise typer.Exit(2) from err
    try:
        if not leaf_renew_days < leaf_days <= ca_days:
            raise BadSettings(
                f"--leaf-renew-days {leaf_renew_days:g}, --leaf-days {leaf_days:g} and --ca-days "
                f"{ca_days:g}: certificates must be renewed before they expire, and expire before "
                "their CA. Example: --leaf-renew-days 30 --leaf-days 90 --ca-days 3650"
            )
        terms = Terms(
            timedelta(days=ca_days), timedelta(days=leaf_days), timedelta(days=leaf_renew_days)
        )
        api = KubeApi(load_configuration())
        try:
            all_wanted = wanted(namespace, tuple(name or ()))
            certificates = Certificates(api, namespace, all_wanted, terms, typer.echo)
            (certificates.renew if renew else certificates.run)(datetime.now(UTC))
        finally:
            api.close()
    except BadSettings as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(2) from err
    except (ApiError, StoreConflict) as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(1) from err


log = structlog.get_logger()

#: The files in the order in which they are copied. A client that reads after the key but before the
#: certificate was copied finds that the two do not match, and reads again.
FILES = ("ca.crt", "tls.key", "tls.crt")
#: Seconds between two checks for changed files.
EVERY_S = 30.0


def copy_certs(
    source: Annotated[Path, typer.Argument(help="Directory in which the Secret is mounted.")],
    target: Annotated[Path, typer.Argument(help="Directory on the host.")],
    once: Annotated[bool, typer.Option("--once", help="Copy once, then exit.")] = False,
) -> None:
    """Copy ca.crt, tls.key and tls.crt, and copy them again whenever they change.

    This is for a kube-scheduler that runs as a static pod, which cannot mount a Secret. Each file
    is replaced atomically and is readable only by its owner. If the Secret lacks a file, its last
    copy is kept. The command runs until SIGTERM or SIGINT.
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
    """Copy the files once, and log the files that are not current. Return whether all are."""
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
