"""Until when the certificates are good that our ports show, told to Prometheus."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class CertificateCollector(Collector):
    """Reads the files at each scrape; one that cannot be read is not told, and not shown either:
    the last good one goes on until it ends."""

    def __init__(self, served: Mapping[str, Path]) -> None:
        """``served``: port -> file of its certificate."""
        self._served = served

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "headroom_certificate_end_timestamp_seconds",
            "When the certificate of a port ends, as its file says now.",
            labels=["port"],
        )
        for port, path in self._served.items():
            try:
                # What reads certificates is of an extra.
                from extender.certs.pki import NotAPair, ends_at
            except ImportError:
                break
            try:
                family.add_metric([port], ends_at(path.read_bytes()).timestamp())
            except (OSError, NotAPair):
                continue
        yield family
