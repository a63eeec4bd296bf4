"""The reference page matches the code."""

from extender.config.reference import GROUPS, page, unit
from extender.config.settings import Settings
from tests.controlplane import ROOT


def test_the_reference_page_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/settings.md").read_text() == page(), "run: make docs"


def test_each_setting_appears_once_with_a_description() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_only_files_are_described_as_paths() -> None:
    paths = {name for name, field in Settings.model_fields.items() if unit(name, field) == "path"}
    assert paths == {
        *("tls_cert", "tls_key", "tls_client_ca", "debug_tls_cert", "debug_tls_key"),
        *("webhook_tls_cert", "webhook_tls_key", "prometheus_token_file", "prometheus_ca"),
    }
