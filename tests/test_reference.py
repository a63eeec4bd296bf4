"""The reference page says what the code says."""

from extender.config.reference import GROUPS, page, unit
from extender.config.settings import Settings
from tests.controlplane import ROOT


def test_the_page_is_that_of_this_code() -> None:
    assert (ROOT / "docs/settings.md").read_text() == page(), "right is: make docs"


def test_each_setting_is_there_once_and_says_what_it_is() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Settings.model_fields)
    assert all(field.description for field in Settings.model_fields.values())


def test_only_what_names_a_file_is_said_to_be_a_path() -> None:
    paths = {name for name, field in Settings.model_fields.items() if unit(name, field) == "path"}
    assert paths == {
        *("tls_cert", "tls_key", "tls_client_ca", "debug_tls_cert", "debug_tls_key"),
        *("webhook_tls_cert", "webhook_tls_key", "prometheus_token_file", "prometheus_ca"),
    }
