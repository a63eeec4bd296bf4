"""Tests the sources of settings, and errors that show the position and a valid example."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headroom.commands import config_commands
from headroom.errors import BadSettings
from headroom.runtime.settings.loading import check_settings, example_of, load_settings
from headroom.runtime.settings.settings import Settings

FILE = """\
# Ours.
policy: spread

score_weights:
  packing: 3
  slack: 2
stale_after_s: 30
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headroom.yaml"
    path.write_text(FILE)
    return path


def problems(path: Path | None, env: dict[str, str] | None = None, **flags: object) -> list[str]:
    settings, found = check_settings(path, env or {}, flags)
    assert (settings is None) == bool(found)
    return [str(problem).replace(f"{path}", "FILE") for problem in found]


def test_the_command_line_overrides_the_environment_which_overrides_the_file(file: Path) -> None:
    env = {"HEADROOM_STALE_AFTER_S": "40", "HEADROOM_VERBS_PORT": "1", "HEADROOM_POLICY": "pack"}
    settings = load_settings(file, env, verbs_port=2, debug_port=None)
    assert (settings.stale_after_s, settings.verbs_port) == (40, 2)
    assert (settings.policy.value, settings.debug_port) == ("pack", 8889)


def test_the_environment_can_override_a_single_field_of_a_setting(file: Path) -> None:
    weights = load_settings(file, {"HEADROOM_SCORE_WEIGHTS__SLACK": "7"}).score_weights
    assert (weights.packing, weights.slack, weights.sm_activity) == (3, 7, 2)
    whole = load_settings(None, {"HEADROOM_SCORE_WEIGHTS": '{"packing": 9}'}).score_weights
    assert whole.packing == 9


@pytest.mark.parametrize("text", ["nvidia.com/a, nvidia.com/b", '["nvidia.com/a","nvidia.com/b"]'])
def test_lists_in_the_environment_are_written_with_commas_or_as_json(text: str) -> None:
    assert load_settings(None, {"HEADROOM_RESOURCES": text}).resources == (
        "nvidia.com/a",
        "nvidia.com/b",
    )


def test_service_variables_of_the_namespace_are_ignored() -> None:
    """For a Service whose name starts with "headroom", the kubelet sets variables in each pod that
    have the prefix of our settings.
    """
    links = {
        "HEADROOM_DEBUG_SERVICE_HOST": "10.96.0.7",
        "HEADROOM_DEBUG_SERVICE_PORT": "8889",
        "HEADROOM_DEBUG_SERVICE_PORT_DEBUG": "8889",
        "HEADROOM_DEBUG_PORT": "tcp://10.96.0.7:8889",
        "HEADROOM_DEBUG_PORT_8889_TCP": "tcp://10.96.0.7:8889",
        "HEADROOM_DEBUG_PORT_8889_TCP_ADDR": "10.96.0.7",
    }
    assert load_settings(None, links).debug_port == 8889
    assert load_settings(None, links | {"HEADROOM_DEBUG_PORT": "7"}).debug_port == 7
    (message,) = problems(None, {"HEADROOM_DEBUG_PORT": "tcp://10.96.0.7:8889"})
    assert message.startswith("$HEADROOM_DEBUG_PORT: debug_port: Input should be a valid integer")


def test_variables_of_kubectl_headroom_are_ignored() -> None:
    assert problems(None, {"HEADROOM_SERVER": "http://x", "HEADROOM_TOKEN": "t", "PATH": "/"}) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "\npolcy: pack",
            "FILE:2: polcy is not a setting; did you mean policy?",
            id="misspelled key",
        ),
        pytest.param(
            "zzz: 1",
            "FILE:1: zzz is not a setting; see docs/reference/settings.md",
            id="unknown key",
        ),
        pytest.param(
            "score_weights:\n  slack: 1\n  pakcing: 1",
            "FILE:3: score_weights.pakcing is not a setting; did you mean packing?",
            id="misspelled key in a section",
        ),
        pytest.param(
            "host: 127.0.0.1\nstale_after_s: soon",
            "FILE:2: stale_after_s: Input should be a valid number, unable to parse string as a "
            "number. Example: stale_after_s: 90",
            id="not a number",
        ),
        pytest.param(
            "policy: pack\npolicy: spread",
            "FILE:2: policy is set twice; remove one of the lines",
            id="repeated key",
        ),
        pytest.param(
            "debug_open: true\n\ndebug_host: 10.1.2.3",
            "FILE:1, FILE:3: debug_open is set and debug_host is 10.1.2.3, so other machines can "
            "read the debug API without authorization; set debug_host: 127.0.0.1, or debug_open: "
            "false",
            id="a contradiction names both lines",
        ),
        pytest.param(
            "largest_devices: [nvidia.com/gpu=80GB]",
            "FILE:1: largest_devices: 'nvidia.com/gpu=80GB': '80GB' is not a quantity",
            id="not a quantity",
        ),
        *(
            pytest.param(
                f"largest_devices: [{text}]",
                f"FILE:1: largest_devices: '{text}' is not valid. Examples: nvidia.com/gpu=80Gi",
                id=text,
            )
            for text in ("a=1Gi/0", "a=1Gi/x", "a=1Gi/", "a=0", "=80Gi", "a=99Ti", "a=1Gi/2000")
        ),
        pytest.param(
            "largest_devices: [a=1Gi, a=2Gi/4]",
            "FILE:1: largest_devices: a is set twice; remove one of the entries",
            id="repeated resource",
        ),
        pytest.param("a: [", "FILE:2: is not YAML", id="not YAML"),
        pytest.param("- a", "FILE: must contain a mapping, as in 'policy: pack'", id="a list"),
    ],
)
def test_an_error_in_the_file_has_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "headroom.yaml"
    path.write_text(text + "\n")
    (found,) = problems(path)
    assert found.startswith(message)


def test_all_errors_are_reported_with_their_position(file: Path) -> None:
    file.write_text("policy: tight\nstale_after_s: 0\n")
    found = problems(
        file,
        {
            "HEADROOM_POLCY": "pack",
            "HEADROOM_SCORE_WEIGHTS__SLACK": "-1",
            "HEADROOM_MAX_BODY": "9 MB",
        },
        verbs_port=70_000,
    )
    assert [line.split(": ")[0] for line in found] == [
        "$HEADROOM_MAX_BODY",
        "$HEADROOM_POLCY",
        "$HEADROOM_SCORE_WEIGHTS__SLACK",
        "--verbs-port",
        "FILE:1",
        "FILE:2",
    ]
    assert found[1].endswith("is not a setting; did you mean HEADROOM_POLICY?")
    assert all("Example: " in line for line in found if "did you mean" not in line)
    with pytest.raises(BadSettings) as caught:
        load_settings(file, {}, verbs_port=70_000)
    assert len(str(caught.value).splitlines()) == 3


def test_the_example_of_each_setting_is_valid(file: Path) -> None:
    together = {
        "prometheus_ca": ("prometheus_url",),
        "prometheus_matchers": ("prometheus_url",),
        "prometheus_token_file": ("prometheus_url",),
        "tls_cert": ("tls_key",),
        "tls_key": ("tls_cert",),
        "webhook_tls_cert": ("webhook_tls_key",),
        "webhook_tls_key": ("webhook_tls_cert",),
        "debug_tls_cert": ("debug_tls_key",),
        "debug_tls_key": ("debug_tls_cert",),
        "tls_client_ca": ("tls_cert", "tls_key"),
    }
    for name in Settings.model_fields:
        text = "\n".join(example_of((each,)) for each in (name, *together.get(name, ())))
        assert text, name
        file.write_text(text)
        assert problems(file) == []


def test_config_check_reports_errors_and_exits_with_2(file: Path) -> None:
    runner = CliRunner()
    file.write_text("# ours\nmode: observe\n")
    good = runner.invoke(config_commands, ["check", str(file)])
    assert good.exit_code == 0
    assert good.stdout == f"{file}: valid, mode: observe (set in {file}:2)\n"
    file.write_text("policy: pack\n")
    assert runner.invoke(config_commands, ["check", str(file)]).stdout == (
        f"{file}: valid, mode: enforce (the default, because no file sets it)\n"
    )
    file.write_text("policy: tight\npolcy: pack\n")
    bad = runner.invoke(config_commands, ["check", str(file)])
    assert bad.exit_code == 2
    assert [line.split(": ")[0] for line in bad.stderr.splitlines()] == [f"{file}:1", f"{file}:2"]
    absent = runner.invoke(config_commands, ["check", str(file.with_name("absent"))])
    assert absent.exit_code == 2
    assert "cannot be read: No such file" in absent.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as the kubelet mounts ConfigMap headroom-config, with the files of two layers."""
    data = tmp_path / "..2026_11_29_12_00_00.1"
    data.mkdir()
    (tmp_path / "..data").symlink_to(data.name)
    layers = {
        "10-base.yaml": "mode: observe\nverbs_host: 127.0.0.1\nscore_weights: {packing: 3}\n",
        "headroom.yaml": "\nmode: enforce\nscore_weights: {slack: 2}\n",
    }
    for name, text in layers.items():
        (data / name).write_text(text)
        (tmp_path / name).symlink_to(f"..data/{name}")
    return tmp_path


def test_a_later_file_of_a_folder_overrides_an_earlier_one(folder: Path) -> None:
    settings = load_settings(folder, {})
    weights = settings.score_weights
    assert (settings.mode.value, settings.verbs_host) == ("enforce", "127.0.0.1")
    assert (weights.packing, weights.slack, weights.sm_activity) == (3, 2, 2)
    (folder / "20-overlay.yaml").write_text("mode: observe\nverbs_host: localhost\n")
    settings = load_settings(folder, {})
    assert (settings.mode.value, settings.verbs_host) == ("enforce", "localhost")
    assert load_settings(folder, {"HEADROOM_MODE": "observe"}).mode.value == "observe"


def test_config_check_names_the_file_of_the_folder_that_sets_the_mode(folder: Path) -> None:
    def check() -> str:
        return CliRunner().invoke(config_commands, ["check", str(folder)]).stdout

    assert check() == f"{folder}: valid, mode: enforce (set in {folder / 'headroom.yaml'}:2)\n"
    (folder / "headroom.yaml").unlink()
    assert check() == f"{folder}: valid, mode: observe (set in {folder / '10-base.yaml'}:1)\n"


def test_an_error_names_the_file_of_the_folder_that_decides(folder: Path) -> None:
    (folder / "10-base.yaml").write_text("mode: obsrve\npolicy: tight\nhost: a\nhost: b\n")
    assert problems(folder) == [
        "FILE/10-base.yaml:2: policy: Input should be 'pack', 'spread' or 'fragmentation'. "
        "Example: policy: fragmentation",
        "FILE/10-base.yaml:4: host is set twice; remove one of the lines",
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param(
            "headroom.yml", "mode: observe", "is not read; rename it to headroom.yaml", id="suffix"
        ),
        pytest.param(
            "headroom.yaml", "mode:", "mode: Input should be 'enforce' or 'observe'", id="no value"
        ),
        pytest.param("headroom.yaml", "- a", "must contain a mapping", id="a list"),
    ],
)
def test_a_file_of_a_folder_is_read_or_rejected(
    folder: Path, name: str, text: str, message: str
) -> None:
    (folder / "headroom.yaml").unlink()
    (folder / name).write_text(text)
    (found,) = problems(folder)
    assert found.startswith(f"FILE/{name}:")
    assert message in found


def test_a_folder_has_at_least_one_file_and_at_most_sixteen(tmp_path: Path) -> None:
    (found,) = problems(tmp_path)
    assert found == "FILE: contains no file of settings. Example: headroom.yaml"
    for number in range(17):
        (tmp_path / f"{number}.yaml").write_text("policy: pack\n")
    (found,) = problems(tmp_path)
    assert found == "FILE: contains 17 files; at most 16 are read"
