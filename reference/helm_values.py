"""The page of the values of the Helm chart."""

import json

import yaml

from reference.markdown import ROOT, head
from release.chart import CHART, values_table

_INTRO = """\
`deploy/chart/headroom/platforms/` has the values for each platform (see
[helm.md](../get-started/helm.md)). The chart rejects values that are not listed here. If a default
is empty here, the chart's manifests contain it.

"""


def page() -> str:
    """Return docs/reference/helm-values.md."""
    values = yaml.safe_load((ROOT / CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((ROOT / CHART / "values.schema.json").read_text(encoding="utf-8"))
    return (
        head("Helm values", f"{CHART}/values.schema.json and values.yaml")
        + _INTRO
        + values_table(schema, values)
        + "\n"
    )
