"""Writes the generated pages of docs/reference, the chart's schema of settings, and the list of
shipped policies."""

from collections.abc import Callable, Mapping

from reference import (
    annotations,
    api,
    cli,
    crd,
    helm_values,
    kubernetes_versions,
    metrics,
    policies,
    processes,
    reasons,
    settings,
    values_schema,
)
from reference.markdown import ROOT

FOLDER = ROOT / "docs/reference"
#: Name of the file -> the function that returns its text.
PAGES: Mapping[str, Callable[[], str]] = {
    "annotations.md": annotations.page,
    "api.md": api.page,
    "cli.md": cli.page,
    "crd.md": crd.page,
    "events.md": reasons.events_page,
    "helm-values.md": helm_values.page,
    "kubernetes-versions.md": kubernetes_versions.page,
    "metrics.md": metrics.page,
    "programs.md": processes.page,
    "reasons.md": reasons.page,
    "settings.md": settings.page,
}


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    values_schema.PATH.write_text(values_schema.text(), encoding="utf-8")
    policies.PATH.write_text(policies.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
