"""Tests changes of a running extender's settings file. Some settings apply immediately, some after
a restart, and an invalid file is rejected.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extender.metrics import Telemetry
from headroom.contract.reasons import Reason
from headroom.runtime.settings import reload
from headroom.runtime.settings.loading import check_settings
from headroom.runtime.settings.reload import Origin, SettingsReloader
from headroom.runtime.settings.settings import RELOADED, Settings
from tests.kubectl.test_commands import run
from tests.processes import starts_processes
from tests.serving import Server, binding, offer, pod, serving
from tests.waiting import until

FLEET = """
nodes:
  - {name: a, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
  - {name: b, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}
"""
CODE, NO_ROOM = Reason.MEMORY_ON_ANY.code, Reason.MEMORY_ON_ANY.sentence


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "headroom.yaml"


@pytest.fixture(scope="module")
@starts_processes
def server(file: Path) -> Iterator[Server]:
    """A server that all tests share, because no test restarts it. Node a is nearly full."""
    file.write_text("stale_after_s: 90\n")
    with serving(FLEET, "--config", str(file)) as running:
        large = pod("large", "20Gi")
        running.post("/filter", offer(large, "a", "b"))
        assert running.post("/bind", binding(large, "a")).json() == {"Error": ""}
        yield running


def settings(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/v1/status").json()["settings"]
    return found


def metric(server: Server, sample: str) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))


def replace(file: Path, text: str) -> None:
    """Replace the file atomically, as the kubelet replaces mounted files."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def filtered(
    server: Server, shown: dict[str, Any], *nodes: str
) -> tuple[list[str], dict[str, str]]:
    answer = server.post("/filter", offer(shown, *nodes)).json()
    return answer["NodeNames"], answer["FailedAndUnresolvableNodes"]


def mode(server: Server, file: Path, wanted: str) -> None:
    replace(file, f"mode: {wanted}\n")
    until(lambda: settings(server)["mode"] == wanted, f"the mode is {wanted}")


def test_a_running_extender_switches_to_mode_observe_and_back(server: Server, file: Path) -> None:
    wide, narrow = pod("wide", "30Gi"), pod("narrow", "10Gi")
    assert filtered(server, wide, "a", "b") == ([], {"a": NO_ROOM, "b": NO_ROOM})
    assert metric(server, "headroom_observe_only ") == 0
    rejected = metric(server, f'headroom_rejected_nodes_total{{reason="{CODE}"}}')

    mode(server, file, "observe")
    assert filtered(server, wide, "a", "b") == (["a", "b"], {})
    assert filtered(server, narrow, "a", "b") == (["a", "b"], {})
    # Prioritize prefers no node, and preempt adds no victims.
    assert server.post("/prioritize", offer(narrow, "a", "b")).json() == []
    assert server.post("/prioritize", offer(pod("plain", gpus=0), "a", "b")).json() == []
    victims = {"a": {"Pods": [{"UID": "x"}], "NumPDBViolations": 0}}
    asked = {"Pod": wide, "NodeNameToVictims": None, "NodeNameToMetaVictims": victims}
    assert server.post("/preempt", asked).json()["NodeNameToMetaVictims"] == victims
    # The pod is bound to kube-scheduler's node, although it does not fit there.
    assert server.post("/bind", binding(narrow, "a")).json() == {"Error": ""}

    assert metric(server, "headroom_observe_only ") == 1
    would = "headroom_would_reject_total"
    message = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in server.get("/metrics").body.decode().splitlines()
        if line.startswith(would + "{") and not line.endswith(" 0.0")
    }
    assert message == {
        f'{would}{{reason="{CODE}",verb="filter"}}': 1,
        f'{would}{{reason="{CODE}",verb="bind"}}': 1,
    }
    assert metric(server, f'headroom_rejected_nodes_total{{reason="{CODE}"}}') == rejected
    (decision,) = server.get("/v1/decisions?pod=default/narrow").json()["decisions"]
    assert decision["filter"]["observed_only"]
    assert (decision["filter"]["offered"], decision["filter"]["fits"]) == (2, 1)
    assert decision["prioritize"]["winner"] == "b"
    bind = decision["bind"]
    assert (bind["node"], bind["outcome"], bind["reason"]) == ("a", "bound", CODE)
    shown = run(server.debug, "decisions", "-A", "--would-reject").stdout.splitlines()
    assert re.split(r"  +", shown[1])[1:] == [
        "default",
        "narrow",
        "a",
        "would reject",
        "mode enforce would have rejected this node: insufficient GPU memory on any device",
    ]
    assert re.split(r"  +", shown[2])[2:5] == ["wide", "-", "would reject"]
    assert shown[2].endswith("mode enforce would have kept it waiting: 2 nodes: " + NO_ROOM)
    assert shown[-3:-1] == [
        "in mode enforce, 1 pod would not have been bound to its node: " + NO_ROOM,
        "in mode enforce, 1 pod would have waited: " + NO_ROOM,
    ]
    assert "decisions are on record since 2" in shown[-1]
    (device,) = server.get("/v1/nodes/a").json()["node"]["devices"]
    assert device["headroom_bytes"] == -6 << 30
    shown = run(server.debug, "top")
    assert shown.stderr == (
        "Headroom only observes (mode: observe): it rejects, prefers and evicts nothing.\n"
    )

    mode(server, file, "enforce")
    assert filtered(server, wide, "a", "b") == ([], {"a": NO_ROOM, "b": NO_ROOM})
    # Enforcement starts with the actual state.
    assert filtered(server, pod("small", "1Gi"), "a", "b")[0] == ["b"]
    assert run(server.debug, "top").stderr == ""


def test_an_invalid_file_changes_nothing_and_is_reported_until_it_is_valid(
    server: Server, file: Path
) -> None:
    reloads = 'headroom_settings_reloads_total{outcome="%s"}'
    rejected, taken = reloads % "rejected", reloads % "taken"
    before = metric(server, rejected), metric(server, taken)
    replace(file, "mode: observe\npolicy: tight\n")
    until(lambda: settings(server)["rejected"], "the file is rejected")
    (message,) = settings(server)["rejected"]
    assert message.startswith(f"{file}:2: policy: Input should be 'pack'")
    assert settings(server)["mode"] == "enforce"
    assert filtered(server, pod("wide", "30Gi"), "a", "b")[0] == []
    file.unlink()
    until(lambda: "cannot be read" in settings(server)["rejected"][0], "it is gone")
    assert metric(server, rejected) == before[0] + 2
    replace(file, "stale_after_s: 60\nreject_unannotated: true\nverbs_port: 1\n")
    until(lambda: not settings(server)["rejected"], "the file is right again")
    # The file cannot change the port, because the command line sets it. The server keeps the first
    # ``stale_after_s`` until it is restarted.
    assert settings(server)["after_restart"] == ["stale_after_s"]
    assert metric(server, taken) == before[1] + 1
    bare = pod("bare")
    assert filtered(server, bare, "b") == ([], {"b": Reason.UNANNOTATED.sentence})
    replace(file, "{}")
    until(lambda: filtered(server, bare, "b")[0] == ["b"], "it is reverted")
    events = [line for line in server.log.read_text().splitlines() if '"settings_' in line]
    assert sum('"settings_rejected"' in line for line in events) == 2


def test_weights_apply_at_once(server: Server, file: Path) -> None:
    def terms() -> str:
        shown = pod("scored", "1Gi", version=str(next(versions)))
        server.post("/filter", offer(shown, "a", "b"))
        body = server.get("/v1/score?pod=default/scored&node=b").json()
        return str(body["score"]["terms"] if "score" in body else body)

    versions = iter(range(1, 1000))
    before = terms()
    replace(file, "score_weights: {packing: 0, slack: 100}\n")
    until(lambda: terms() != before, "other weights give other scores")


def test_every_reloadable_name_is_a_setting() -> None:
    assert set(RELOADED) <= set(Settings.model_fields)


class Reloading:
    """Reloads a settings file in ``folder``. The test triggers the checks of the file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "headroom.yaml"
        self.file.write_text("mode: enforce\n")
        self.modes: list[str] = []
        self.telemetry = Telemetry(CollectorRegistry())
        self.reloader = SettingsReloader(
            Origin(self.file),
            Settings(),
            lambda settings: self.modes.append(settings.mode.value),
            self.telemetry,
        )

    def reloads(self) -> tuple[float, float]:
        """Return the numbers of rejected and accepted reloads."""
        counter = self.telemetry.settings_reloads
        return counter.labels("rejected")._value.get(), counter.labels("taken")._value.get()


def test_a_changed_added_or_removed_file_of_a_folder_is_applied(tmp_path: Path) -> None:
    reloading = Reloading(tmp_path)
    reloading.reloader = SettingsReloader(
        Origin(tmp_path),
        Settings(),
        lambda settings: reloading.modes.append(settings.mode.value),
        reloading.telemetry,
    )
    reloading.reloader.once()
    added = tmp_path / "own.yaml"
    added.write_text("mode: observe\n")
    reloading.reloader.once()
    added.unlink()
    reloading.reloader.once()
    assert reloading.modes == ["observe", "enforce"]
    (tmp_path / "own.yml").write_text("mode: observe\n")
    for _ in range(2):  # An error counts only if it occurs in two checks, like a missing file.
        reloading.reloader.once()
    (message,) = reloading.reloader.rejected
    assert message == f"{tmp_path}/own.yml: is not read; rename it to own.yaml"
    assert reloading.modes == ["observe", "enforce"]


def test_a_file_that_is_missing_for_a_moment_is_not_rejected(tmp_path: Path) -> None:
    """The kubelet may replace the file of a ConfigMap between two checks or during a check."""
    reloading = Reloading(tmp_path)
    reloading.file.unlink()
    reloading.reloader.once()
    reloading.file.write_text("mode: observe\n")
    reloading.reloader.once()
    assert (reloading.modes, reloading.reloads()) == (["observe"], (0, 1))
    for _ in range(2):
        reloading.file.unlink(missing_ok=True)
        reloading.reloader.once()
    assert reloading.reloader.rejected == (
        f"{reloading.file}: cannot be read: No such file or directory",
    )
    assert reloading.reloads() == (1, 1)


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reloading = Reloading(tmp_path)
    replace(reloading.file, "mode: obse")

    def read(*sources: Any) -> Any:
        found = check_settings(*sources)
        replace(reloading.file, "mode: observe\n")
        return found

    monkeypatch.setattr(reload, "check_settings", read)
    reloading.reloader.once()
    assert (reloading.modes, reloading.reloads()) == ([], (0, 0))
    reloading.reloader.once()
    assert (reloading.modes, reloading.reloads()) == (["observe"], (0, 1))
