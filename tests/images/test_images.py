"""Runs `make images` with a real builder, and checks both images, their configuration and their
files.
"""

import json
import os
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.controlplane import ROOT
from tests.debian import Unavailable
from tests.deploy.pages import play
from tests.deploy.rendered import DEPLOY, objects, overlay, pod_specs, with_components
from tests.images.building import Builder
from tests.processes import starts_processes

VERSION = "0.0.0-images"
REGISTRY = "registry.example"
#: Matches the programs that an image may contain: the interpreter and Headroom, but no shell and no
#: pip.
PROGRAM = re.compile(r"/usr(/local)?/bin/python3(\.\d+)?|/opt/headroom/bin/.*")
INVENTORY = Path(__file__).with_name("inventory.py").read_text()


@pytest.fixture(scope="module")
@starts_processes
def archives(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Builder, Path]:
    """Build both images. Return a folder with their archives."""
    if os.geteuid() != 0:
        pytest.skip("building in a chroot needs root")
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # Show the progress of the build, because the first build takes minutes.
    with capture.global_and_fixture_disabled():
        try:
            builder = Builder()
        except Unavailable as err:
            pytest.skip(str(err))
        folder = tmp_path_factory.mktemp("archives")

        def run(command: str) -> tuple[str, int]:
            return builder.build(VERSION, REGISTRY, command, OUT=str(folder)), 0

        words = {"python:3.12-slim@sha256:DIGEST": "$BASE", "REGISTRY=REGISTRY": ""}
        play("get-started/images.md", "build", run, words)
    return builder, folder


@pytest.fixture
def builder(archives: tuple[Builder, Path]) -> Builder:
    return archives[0]


@pytest.fixture(params=["extender", "agent"])
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def image(name: str) -> str:
    return f"{REGISTRY}/headroom-{name}:{VERSION}"


def configuration(builder: Builder, name: str) -> dict[str, Any]:
    found: dict[str, Any] = builder.inspect(image(name))["OCIv1"]["config"]
    return found


def locked(lock: str, python: str) -> dict[str, str]:
    """Return the version of each package in a lock file for this version of Python."""
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    found = {}
    for line in re.findall(r"^(\w.*==.*) \\$", text, re.MULTILINE):
        each = Requirement(line)
        if each.marker is None or each.marker.evaluate({"python_full_version": python}):
            (version,) = each.specifier
            found[each.name] = version.version
    return found


def test_images_have_the_expected_configuration(builder: Builder, name: str) -> None:
    config = configuration(builder, name)
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == {"extender": ["headroom"], "agent": ["headroom", "agent"]}[name]
    assert config.get("Cmd") == {"extender": ["--help"], "agent": None}[name]
    ports = {"extender": ["8888/tcp", "8889/tcp", "9443/tcp"], "agent": ["9410/tcp", "9412/tcp"]}
    assert sorted(config["ExposedPorts"]) == ports[name]
    assert "PATH=/opt/headroom/bin" in config["Env"]


def test_labels_contain_version_commit_and_base(builder: Builder, name: str) -> None:
    labels = configuration(builder, name)["Labels"]
    prefix = "org.opencontainers.image."
    found = {key.removeprefix(prefix): text for key, text in labels.items() if prefix in key}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert found["revision"].removesuffix("-dirty") == commit
    del found["revision"]
    base, _, digest = builder.base().partition("@")
    assert found == {
        "title": f"headroom-{name}",
        "licenses": "Apache-2.0",
        "version": VERSION,
        "base.name": base,
        "base.digest": digest,
    }


def test_images_contain_only_the_expected_files(
    builder: Builder, name: str, record_property: Callable[[str, object], None]
) -> None:
    done = builder.run(image(name), "python", "-c", INVENTORY)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    record_property("measured", f"{name}: {found['bytes'] >> 20} MiB in /opt/headroom")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = {"headroom-gpu": project["version"]}
    assert found["packages"] == locked(name, found["python"]) | own
    rooms = set(found["rooms"])
    if name == "agent":
        assert rooms == {
            *("agent", "headroom", "headroom.client"),
            "headroom.contract",
            "headroom.system",
        }
    else:
        assert {"extender", "headroom.console", "headroom.core", "headroom.webhook"} < rooms
        assert "agent" not in rooms
    assert found["not compiled"] == [], "a read-only container would compile at every start"
    assert [each for each in found["programs"] if not PROGRAM.fullmatch(each)] == []
    assert not {"src", "dist"} & set(found["root"]), "folders of the build remain"
    assert found["user"] == [65532, 65532]
    assert found["owners"] == [0]
    assert found["writable"] == []


def test_each_command_of_the_extender_image_reports_what_it_lacks(builder: Builder) -> None:
    for command, reason in {
        "extender": "no cluster is configured",
        "console": "no cluster is configured",
        "webhook": "webhook_tls_cert and webhook_tls_key are not set",
    }.items():
        started = builder.run(image("extender"), "headroom", command)
        assert started.returncode == 2
        assert reason in started.stderr
    # Test a command of a Job, and a command that people run in the container.
    for command in ("certs", "why"):
        helped = builder.run(image("extender"), "headroom", command, "--help")
        assert helped.returncode == 0, helped.stderr


#: Components that, with the overlay, have all containers of Headroom.
EVERY_POD = ("device-taints", "../default-scheduler")


def test_images_can_run_all_commands_of_the_manifests(builder: Builder, tmp_path: Path) -> None:
    """Run the commands and probes of all pods without a shell. Commands only print their help."""
    commands: dict[str, set[tuple[str, ...]]] = {"extender": set(), "agent": set()}
    probes: set[tuple[str, ...]] = set()
    rendered = [with_components(tmp_path, EVERY_POD), overlay(DEPLOY / "overlays/device-plugin")]
    for spec in (spec for text in rendered for spec in pod_specs(objects(text)).values()):
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            name = re.findall(r"/headroom-(\w+):", container["image"])
            if not name:  # kube-scheduler
                continue
            given = container.get("command", ["headroom", *container.get("args", [])])
            # Leave out the options, because they need the files of a cluster.
            commands[name[0]].add((*[each for each in given[:2] if each[0] not in "-/"], "--help"))
            for field in ("livenessProbe", "readinessProbe", "startupProbe"):
                action = container.get(field, {}).get("exec")
                if action:
                    assert name == ["agent"]
                    probes.add(tuple(action["command"]))
            assert "lifecycle" not in container or container["lifecycle"] == {
                "preStop": {"sleep": {"seconds": 5}}
            }, "a hook that runs a program"
    commands["agent"] = {("headroom", "agent", "--help")}
    assert len(commands["extender"]) > 5
    for name, every in commands.items():
        for command in every:
            done = builder.run(image(name), *command)
            assert done.returncode == 0, (command, done.stderr)
    assert probes
    for probe in probes:
        done = builder.run(image("agent"), *probe)
        assert (done.returncode, "refused" in done.stdout + done.stderr) == (1, True), done


def test_the_agent_image_reports_a_missing_driver(builder: Builder) -> None:
    started = builder.run(image("agent"), "headroom", "agent", "--once", "--json")
    assert started.returncode == 1, started.stderr
    driver = json.loads(started.stdout)["conditions"][0]
    assert (driver["type"], driver["status"], driver["reason"]) == (
        "DriverReady", "False", "NoDriver",
    )  # fmt: skip
    for gate in (["headroom", "gate"], ["python", "-I", "-m", "agent.gate_client"]):
        asked = builder.run(image("agent"), *gate)
        assert asked.returncode == 2
        assert "POD_UID is not set" in asked.stdout + asked.stderr


def test_archives_contain_the_name_of_their_image(archives: tuple[Builder, Path]) -> None:
    found = sorted(archives[1].iterdir())
    assert [each.name for each in found] == ["headroom-agent.tar", "headroom-extender.tar"]
    for each in found:
        index = json.loads(_member(each, "index.json"))
        (manifest,) = index["manifests"]
        named = manifest["annotations"]["org.opencontainers.image.ref.name"]
        assert named == f"{REGISTRY}/{each.stem}:{VERSION}"


def _member(archive: Path, name: str) -> bytes:
    with tarfile.open(archive) as files:
        found = files.extractfile(name)
        assert found is not None
        return found.read()


@pytest.mark.parametrize("base", ["", "python:3.12-slim", "python:3.12-slim@sha256:"])
def test_a_base_image_without_a_digest_is_rejected(base: str) -> None:
    done = subprocess.run(
        [ROOT / "deploy/images.sh"],
        env={"PATH": os.environ["PATH"], "BASE": base},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"deploy/images.sh: BASE is '{base}', not an image by digest. "
        "Example: BASE=python:3.12-slim@sha256:..."
    )
