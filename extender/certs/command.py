"""``headroom certs``: creates and renews the certificates of a cluster without cert-manager."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from extender.errors import BadSettings, StoreConflict


def certs(
    namespace: Annotated[
        str, typer.Option(help="Namespace of the Secrets and Services.")
    ] = "headroom-system",
    name: Annotated[
        list[str] | None,
        typer.Option(help="Additional DNS name or address of the servers; may be repeated."),
    ] = None,
    leaf_days: Annotated[
        float, typer.Option(min=0.001, max=398, help="Lifetime of certificates, in days.")
    ] = 90,
    leaf_renew_days: Annotated[
        float, typer.Option(min=0, help="Renew a certificate this many days before it expires.")
    ] = 30,
    ca_days: Annotated[
        float, typer.Option(min=0.001, max=36_500, help="Lifetime of CA certificates, in days.")
    ] = 3650,
) -> None:
    """Create missing certificates, and renew certificates that expire soon.

    Run it as a Job when Headroom is installed, and every day as a CronJob. A run changes nothing if
    all certificates are valid. It writes the Secrets headroom-ca, headroom-tls and
    headroom-scheduler-client, and the caBundle of webhook configurations with the label
    app.kubernetes.io/part-of: headroom. It prints each change. Exit status 1: try again; 2: the
    options or Secrets must be fixed first.
    """
    try:
        # The client for the API server is an optional dependency, and slow to import.
        from extender.certs.plan import Terms
        from extender.certs.reconcile import Certificates, wanted
        from extender.kube.api_errors import ApiError
        from extender.kube.client import KubeApi, load_configuration
    except ImportError as err:
        typer.echo(f"headroom: {err}: install headroom-gpu[extender,cluster]", err=True)
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
            Certificates(
                api, namespace, wanted(namespace, tuple(name or ())), terms, typer.echo
            ).run(datetime.now(UTC))
        finally:
            api.close()
    except BadSettings as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(2) from err
    except (ApiError, StoreConflict) as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(1) from err
