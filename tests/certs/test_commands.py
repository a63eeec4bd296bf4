"""Checks that headroom certs rejects invalid settings before it calls the API server."""

import pytest
import typer
from typer.testing import CliRunner

from headroom.certs.commands import certs

#: An app with only this command, because the complete app configures logging for the whole process.
app = typer.Typer()
app.command()(certs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--leaf-days", "30"], "--leaf-days 30", id="renewed at once"),
        pytest.param(["--ca-days", "10"], "--ca-days 10", id="the CA expires first"),
    ],
)
def test_contradictory_validity_periods_are_rejected_with_an_example(
    options: list[str], message: str
) -> None:
    rejected = CliRunner().invoke(app, options)
    assert rejected.exit_code == 2
    assert message in rejected.stderr
    assert "Example: --leaf-renew-days 30 --leaf-days 90 --ca-days 3650" in rejected.stderr


def test_without_a_cluster_the_command_reports_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    rejected = CliRunner().invoke(app, [])
    assert rejected.exit_code == 2
    assert rejected.stderr.startswith("headroom: ")
