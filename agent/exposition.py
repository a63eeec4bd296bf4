"""Renders metrics in Prometheus's text format, version 0.0.4.

The output is the same as that of ``generate_latest`` of prometheus_client. That function also
checks the name of every label of every series, which takes more than half of its CPU time. This
matters because any pod can request metrics (docs/design/agent.md).
"""

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

#: The type in this format, and the suffix of the name, for each type of metric.
_TYPES = {"counter": ("counter", "_total"), "gauge": ("gauge", ""), "info": ("gauge", "_info")}


def rendered(metrics: Iterable[Metric]) -> bytes:
    """Render counters, gauges and infos. Raises ``KeyError`` for another type."""
    lines: list[str] = []
    for metric in metrics:
        kind, suffix = _TYPES[metric.type]
        name = metric.name + suffix
        documentation = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines += (f"# HELP {name} {documentation}", f"# TYPE {name} {kind}")
        for sample in metric.samples:
            pairs = [f'{key}="{_escaped(value)}"' for key, value in sorted(sample.labels.items())]
            labels = f"{{{','.join(pairs)}}}" if pairs else ""
            value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            lines.append(f"{sample.name}{labels} {value}")
    return "".join(f"{line}\n" for line in lines).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
