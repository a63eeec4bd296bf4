"""Checks that settings are valid as a whole, or rejected with the key and the error."""

from pathlib import Path

import pytest

from headroom.errors import BadSettings
from headroom.runtime.settings.constraints import check_scheduler_is_authenticated
from headroom.runtime.settings.loading import load_settings
from headroom.runtime.settings.settings import Settings


def test_default_settings_are_valid() -> None:
    settings = load_settings(None)
    assert (settings.verbs_port, settings.debug_port) == (8888, 8889)
    assert settings.rules.manages("nvidia.com/mig-1g.10gb")
    assert not settings.rules.manages("nvidia.com/gpu.count")
    assert not settings.rules.manages("cpu")


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("{max_body: 1Mi, policy: spread, verbs_port: 1}")
    settings = load_settings(path, verbs_port=2, host=None)
    assert (settings.max_body, settings.policy.value, settings.verbs_port) == (1 << 20, "spread", 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("polcy: pack", "polcy is not a setting", id="unknown key"),
        pytest.param("policy: tight", "policy: Input should be 'pack'", id="unknown value"),
        pytest.param("max_body: -1", "max_body: ", id="negative"),
        pytest.param("max_body: 8 MB", "Example: 64Mi", id="not a quantity"),
        pytest.param("resources: []", "resources: ", id="no resources"),
        pytest.param("stale_after_s: 0", "stale_after_s: ", id="zero seconds"),
        pytest.param("verbs_port: 70000", "verbs_port: ", id="invalid port"),
        pytest.param("prometheus_url: prometheus:9090", "prometheus_url: ", id="no scheme"),
        pytest.param("prometheus_url: http://", "prometheus_url: ", id="no host"),
        pytest.param("prometheus_url: 'http://p:x'", "prometheus_url: ", id="port is not a number"),
        pytest.param("prometheus_url: 'http://p/?q=1'", "prometheus_url: ", id="with a query"),
        *(
            pytest.param(f"grafana_url: '{url}'", "&var-namespace={namespace}", id=f"link {url}")
            for url in (
                *("grafana/d/x?node={node}", "javascript:alert({node})", "http://{node}/d/x"),
                *(
                    "http://g/d/{node}",
                    "http://g/?n={nodes}",
                    "http://g/?n={node",
                    "http://g/?n={}",
                ),
                *("http://g/?n={node!r}", "http://g/?n={node} b"),
            )
        ),
        pytest.param(
            "prometheus_ca: ca.crt", "set without prometheus_url", id="CA without a server"
        ),
        pytest.param(
            "prometheus_quantile: 95", "prometheus_quantile: ", id="percentage instead of a ratio"
        ),
        pytest.param("prometheus_window_s: 15", "prometheus_window_s: ", id="too short window"),
    ],
)
def test_an_error_names_its_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(BadSettings) as caught:
        load_settings(path)
    assert says in str(caught.value)


def test_a_link_may_contain_all_names_in_its_query() -> None:
    link = "https://g/d/x?n={node}&u={uuid}&s={namespace}&p={pod}&from={from_ms}&to={to_ms}"
    assert load_settings(None, grafana_url=link).grafana_url == link


def test_every_setting_has_a_description() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_the_password_in_a_url_is_never_shown() -> None:
    sound = Settings(prometheus_url="https://u:s3cret@p:9090/prefix")
    assert "s3cret" not in f"{sound} {sound!r}"
    with pytest.raises(BadSettings) as caught:
        load_settings(None, prometheus_url="htp://u:s3cret@p:9090")
    assert "Example: http://prometheus.monitoring:9090" in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_debug_api_may_be_open_on_loopback(host: str) -> None:
    assert load_settings(None, host=host, debug_open=True).debug_open


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "extender.example"])
def test_the_debug_api_cannot_be_open_to_other_hosts(host: str) -> None:
    assert load_settings(None, debug_host=host).debug_at == host
    with pytest.raises(BadSettings, match=r"set debug_host: 127\.0\.0\.1"):
        load_settings(None, debug_host=host, debug_open=True)


@pytest.mark.parametrize("name", ["host", "verbs_host"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "extender.example"])
def test_the_verbs_require_a_client_certificate_outside_loopback(name: str, host: str) -> None:
    tls = {"tls_cert": Path("a"), "tls_key": Path("b"), "tls_client_ca": Path("c")}
    for given, missing in (
        ({}, "tls_cert and tls_key and tls_client_ca are not set"),
        ({key: tls[key] for key in ("tls_cert", "tls_key")}, "and tls_client_ca is not set"),
    ):
        with pytest.raises(BadSettings, match=missing) as caught:
            load_settings(None, **{name: host}, **given)
        assert f"{name} is {host}, so other machines can call bind" in str(caught.value)
        assert str(caught.value).endswith("or set verbs_host: 127.0.0.1")
    assert load_settings(None, **{name: host}, **tls).verbs_at == host
    with pytest.raises(BadSettings, match="so other machines can call bind"):
        load_settings(None, **{name: host}, insecure_verbs=True)


def test_the_verbs_in_a_cluster_require_a_client_certificate_on_loopback_too() -> None:
    tls = {"tls_cert": Path("a"), "tls_key": Path("b")}
    for given in ({}, tls):
        with pytest.raises(BadSettings, match="tls_client_ca is not set"):
            check_scheduler_is_authenticated(load_settings(None, **given))
    for given in ({**tls, "tls_client_ca": Path("c")}, {"insecure_verbs": True}):
        check_scheduler_is_authenticated(load_settings(None, **given))


def test_a_token_for_prometheus_is_not_sent_without_encryption() -> None:
    token = Path("token")
    with pytest.raises(BadSettings, match="prometheus_url is not encrypted") as caught:
        load_settings(None, prometheus_url="http://prometheus:9090", prometheus_token_file=token)
    assert "Example: prometheus_url: https://prometheus:9090" in str(caught.value)
    for url in ("https://prometheus:9090", "http://127.0.0.1:9090"):
        load_settings(None, prometheus_url=url, prometheus_token_file=token)
    load_settings(None, prometheus_url="http://prometheus:9090")


def test_verbs_and_debug_api_can_have_different_hosts() -> None:
    settings = load_settings(None, host="0.0.0.0", verbs_host="127.0.0.1")
    assert (settings.verbs_at, settings.debug_at) == ("127.0.0.1", "0.0.0.0")
