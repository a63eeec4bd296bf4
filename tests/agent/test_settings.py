"""Tests the defaults and invalid values of the agent's flags."""

import pytest

from agent.settings import read_settings
from headroom.contract.annotations import DeviceChoice


def test_defaults_match_the_design() -> None:
    settings = read_settings([], {"NODE_NAME": "n1"})
    assert settings.node == "n1"
    assert (settings.host, settings.port) == ("", 9410)
    assert (settings.interval_s, settings.heartbeat_s) == (5, 30)
    assert settings.namespace == "headroom-system"
    assert (settings.resource, settings.replicas, settings.sharing) == ("nvidia.com/gpu", 1, "none")
    assert settings.publish


def test_the_environment_of_the_manifest_sets_the_flags() -> None:
    env = {
        "NODE_NAME": "n1",
        "HEADROOM_RESOURCE": "nvidia.com/gpu.shared",
        "HEADROOM_REPLICAS": "4",
        "HEADROOM_SHARING": "mps",
        "HEADROOM_DEVICE_CHOICE": "steered",
    }
    settings = read_settings([], env)
    assert (settings.resource, settings.replicas, settings.sharing) == (
        "nvidia.com/gpu.shared",
        4,
        "mps",
    )
    assert settings.device_choice is DeviceChoice.STEERED


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param([], "no node name", id="the node is not set"),
        pytest.param(["--node", "n", "--replicas", "4"], "contradict", id="unknown way of sharing"),
        pytest.param(["--node", "n", "--sharing", "mps"], "contradict", id="shared by one pod"),
        pytest.param(["--node", "n", "--replicas", "0"], "is not 1..", id="no replicas"),
        pytest.param(
            ["--node", "n", "--device-choice", "best"], "'steered'", id="unknown device choice"
        ),
        pytest.param(
            ["--node", "n", "--device-choice", "steered", "--no-publish"], "ledger", id="no ledger"
        ),
        pytest.param(["--node", "n", "--listen", "9410x"], "HOST:PORT", id="no port"),
        pytest.param(["--node", "n", "--listen", ":" + "9" * 5000], "HOST:PORT", id="invalid port"),
        pytest.param(["--node", "n", "--interval", "0"], "--interval 5", id="interval of 0"),
        pytest.param(
            ["--node", "n", "--unified-memory", "all"], "neither auto nor", id="pool of 0 bytes"
        ),
        pytest.param(["--node", "n", "--unified-memory", "96"], "less than 1Mi", id="96 bytes"),
        pytest.param(["--node", "n", "--stale-after", "20"], "heartbeat (30", id="stale too soon"),
        pytest.param(["--node", "n", "--stale-after", "inf"], "--stale-after 90", id="never stale"),
        pytest.param(
            ["--node", "n", "--interval", "nan"], "--interval 5", id="interval is not a number"
        ),
    ],
)
def test_invalid_flags_are_rejected_with_an_example(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(flags, {})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://dcgm:9400/metrics", "uses TLS, which the agent does not support"),
        ("http://admin:secret@dcgm:9400/metrics", "has a user name or a password for dcgm"),
        ("http://admin:secret@dcgm:port/metrics", "has a user name or a password for dcgm"),
        ("http://:secret@/", "has a user name or a password"),
        ("ftp://dcgm/metrics", "is not a URL with http:// and a host"),
        ("dcgm:9400", "is not a URL with http:// and a host"),
        ("http://dcgm:99999/", "is not a URL"),
        ("http://[::1/metrics", "is not a URL"),
    ],
)
def test_an_invalid_url_of_dcgm_is_rejected_with_the_reason(
    url: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--node", "n", "--dcgm-url", url], {})
    error = capsys.readouterr().err
    assert message in error
    assert "secret" not in error


@pytest.mark.parametrize(
    "url", ["http://dcgm:9400/metrics?collect=sm", "http://[fd00::1]:9400/metrics", "http://dcgm"]
)
def test_valid_urls_of_dcgm_are_accepted(url: str) -> None:
    assert read_settings(["--node", "n", "--dcgm-url", url], {}).dcgm_url == url
