"""Exports the expiry times of the certificates of Headroom's ports to Prometheus."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


class CertificateCollector(Collector):
    """Reads the certificate files at each scrape.

    It exports nothing for a file that cannot be read. The server does not load such a file either:
    it keeps the previous certificate.
    """

    def __init__(self, served: Mapping[str, Path]) -> None:
        """Create a collector; ``served`` maps each port to the file of its certificate."""
        self._served = served

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "headroom_certificate_end_timestamp_seconds",
            "Expiry time of the certificate in the file of a port.",
            labels=["port"],
        )
        for port, path in self._served.items():
            try:
                # The package that reads certificates is an optional dependency.
                from extender.certs.pki import NotAPair, ends_at
            except ImportError:
                break
            try:
                family.add_metric([port], ends_at(path.read_bytes()).timestamp())
            except (OSError, NotAPair):
                continue
        yield family
