"""Checks that the metric of the certificate's expiry follows the certificate files."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from prometheus_client import CollectorRegistry

from headroom.certs.pki import new_authority
from headroom.runtime.settings.loading import load_settings
from headroom.runtime.telemetry import CertificateCollector

NAME = "headroom_certificate_end_timestamp_seconds"
NOW = datetime(2026, 11, 22, tzinfo=UTC)


def test_the_expiry_is_exposed_for_each_port_and_updated_after_a_renewal(tmp_path: Path) -> None:
    cert, other = tmp_path / "tls.crt", tmp_path / "other.crt"
    cert.write_bytes(new_authority("x", NOW, timedelta(days=1)).cert)
    files = {"tls_cert": cert, "tls_key": cert, "debug_tls_cert": other, "debug_tls_key": cert}
    registry = CollectorRegistry()
    registry.register(CertificateCollector(load_settings(None, {}, **files).served_certificates))

    def ends(port: str) -> float | None:
        return registry.get_sample_value(NAME, {"port": port})

    assert ends("verbs") == (NOW + timedelta(days=1)).timestamp()
    assert ends("debug") is None  # The file is unreadable.
    other.write_text("no certificate")
    assert ends("debug") is None
    other.write_bytes(new_authority("x", NOW, timedelta(days=3)).cert)
    assert ends("debug") == (NOW + timedelta(days=3)).timestamp()
