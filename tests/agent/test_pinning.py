"""Whether a pod's own NVIDIA_VISIBLE_DEVICES decides: the table of the container toolkit."""

import tomllib
from typing import Any

import pytest

from agent.probes.plugin_config import obeys_environment
from agent.sharing import pinning


@pytest.mark.parametrize(
    ("strategies", "obeys", "expected"),
    [
        pytest.param(["envvar"], True, "honoured", id="the variable, and the toolkit obeys it"),
        pytest.param(["envvar"], False, "ignored", id="the administrator forbids it"),
        pytest.param(["envvar"], None, "unknown", id="the toolkit is not seen"),
        pytest.param(["volume-mounts"], True, "ignored", id="mounts are preferred"),
        pytest.param(["cdi-annotations", "cdi-cri"], True, "ignored", id="the GPU Operator"),
        pytest.param(["cdi-cri"], True, "ignored", id="the runtime injects devices by itself"),
        pytest.param(["cdi-annotations", "envvar"], True, "unknown", id="depends on the mode"),
        pytest.param([], True, "unknown", id="the plugin is not seen"),
    ],
)
def test_pinning_is_reported_only_if_nothing_prevents_it(
    strategies: list[str], obeys: bool | None, expected: str
) -> None:
    assert pinning(strategies, obeys) == expected


@pytest.mark.parametrize(
    ("obeys", "expected"),
    [
        pytest.param(True, "unknown", id="the pod also sees the plugin's choice"),
        pytest.param(False, "ignored", id="no other device is visible"),
    ],
)
def test_device_files_of_the_plugin_are_seen_too(obeys: bool, expected: str) -> None:
    assert pinning(["envvar"], obeys, passes_device_specs=True) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param("", True, id="empty: the toolkit's defaults"),
        pytest.param("accept-nvidia-visible-devices-envvar-when-unprivileged = false", False),
        pytest.param('[nvidia-container-runtime]\nmode = "legacy"', True),
        pytest.param('[nvidia-container-runtime]\nmode = "cdi"', None, id="needs a CDI name"),
        pytest.param('[nvidia-container-runtime]\nmode = "csv"', None, id="a mode of Tegra's"),
        pytest.param("nvidia-container-runtime = 1", True, id="not a table"),
    ],
)
def test_the_toolkit_obeys_unless_it_is_configured_otherwise(
    config: str, expected: bool | None
) -> None:
    decoded: dict[str, Any] = tomllib.loads(config)
    assert obeys_environment(decoded) is expected
