"""``headroom certs``: the certificates of a cluster without cert-manager."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from extender.errors import BadSettings, StoreConflict


def certs(
    namespace: Annotated[
        str, typer.Option(help="Of the Secrets and Services.")
    ] = "headroom-system",
    name: Annotated[
        list[str] | None,
        typer.Option(help="One more DNS name or address to serve under; may be repeated."),
    ] = None,
    leaf_days: Annotated[
        float, typer.Option(min=0.001, max=398, help="How long certificates are valid, in days.")
    ] = 90,
    leaf_renew_days: Annotated[
        float, typer.Option(min=0, help="They are renewed so many days before their end.")
    ] = 30,
    ca_days: Annotated[
        float, typer.Option(min=0.001, max=36_500, help="How long authorities are valid, in days.")
    ] = 3650,
    ca_renew_days: Annotated[
        float, typer.Option(min=0, help="The next one is made so many days before their end.")
    ] = 365,
    settle_days: Annotated[
        float,
        typer.Option(
            min=0,
            help="Days between two steps of a change of authority: the next one is trusted, it "
            "signs, the old one is trusted no more. A kube-scheduler that speaks TLS with the "
            "extender is to be restarted in each of them.",
        ),
    ] = 30,
    renew_ca: Annotated[
        bool, typer.Option("--renew-ca", help="Begin a change of both authorities now.")
    ] = False,
) -> None:
    """Make the certificates that are missing, and renew those that are due.

    One run, which changes nothing where all is well: as a Job when Headroom is installed, then
    every day as a CronJob. Writes the Secrets headroom-ca, headroom-tls and
    headroom-scheduler-client, and the caBundle of webhook configurations that are labelled
    app.kubernetes.io/part-of: headroom. Says what it did; exit status 2: it cannot, 1: try again.
    """
    try:
        # What talks to a cluster is an extra, and slow to import.
        from extender.certs.cluster import Certificates, wanted
        from extender.certs.plan import Terms
        from extender.kubeapi import ApiError, KubeApi, load_configuration
    except ImportError as err:
        typer.echo(f"headroom: {err}: install headroom-gpu[extender,cluster]", err=True)
        raise typer.Exit(2) from err
    try:
        for begin, days, renewed_days in (
            ("leaf", leaf_days, leaf_renew_days),
            ("ca", ca_days, ca_renew_days),
        ):
            if not renewed_days < days:
                raise BadSettings(
                    f"--{begin}-renew-days {renewed_days:g} is not less than --{begin}-days "
                    f"{days:g}: every run would renew; right is, for example, "
                    f"--{begin}-days 90 --{begin}-renew-days 30"
                )
        if not leaf_days + 2 * settle_days <= ca_renew_days:
            raise BadSettings(
                f"--ca-renew-days {ca_renew_days:g} leaves no time for --leaf-days {leaf_days:g} "
                f"and twice --settle-days {settle_days:g}; right is, for example, "
                "--leaf-days 90 --settle-days 30 --ca-renew-days 365"
            )
        terms = Terms(
            timedelta(days=ca_days),
            timedelta(days=ca_renew_days),
            timedelta(days=settle_days),
            timedelta(days=leaf_days),
            timedelta(days=leaf_renew_days),
        )
        api = KubeApi(load_configuration())
        try:
            Certificates(
                api, namespace, wanted(namespace, tuple(name or ())), terms, typer.echo
            ).run(datetime.now(UTC), renew_ca)
        finally:
            api.close()
    except BadSettings as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(2) from err
    except (ApiError, StoreConflict) as err:
        typer.echo(f"headroom: {err}", err=True)
        raise typer.Exit(1) from err
