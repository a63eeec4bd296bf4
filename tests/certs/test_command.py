"""headroom certs refuses what would never be at rest, before it asks anybody."""

import pytest
import typer
from typer.testing import CliRunner

from extender.certs.command import certs

#: Alone: all of the commands together say where logs go, for the whole process.
app = typer.Typer()
app.command()(certs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            ["--leaf-days", "30", "--leaf-renew-days", "30"],
            "--leaf-renew-days 30 is not less than --leaf-days 30: every run would renew; right is",
            id="renewed as soon as it is made",
        ),
        pytest.param(
            ["--ca-days", "10"],
            "--ca-renew-days 365 is not less than --ca-days 10",
            id="an authority that is always due",
        ),
        pytest.param(
            ["--settle-days", "200"],
            "--ca-renew-days 365 leaves no time for --leaf-days 90 and twice --settle-days 200",
            id="an authority that ends before the next one signs",
        ),
    ],
)
def test_terms_that_contradict_each_other_are_refused_with_a_right_example(
    options: list[str], said: str
) -> None:
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"headroom: {said}")
    assert "right is, for example" in refused.stderr


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    refused = CliRunner().invoke(app, [])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("headroom: ")
