"""Checks the artefacts of a release: versions, reproducible bytes, and acceptance by other
tools.
"""

import json
import os
import re
import runpy
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from release.archives import File, normalise, write_tar_gz
from release.chart import build_chart, rows
from release.client import PLATFORMS
from release.images import build_images
from release.krew import validate, write_manifest
from release.notes import notes
from release.packages import build_packages
from release.source import ReleaseError, Source, export, version_of
from tests.controlplane import ROOT, built
from tests.deploy.rendered import run
from tests.release.conftest import REPOSITORY, Packages, exported

#: Matches files that may contain any version, such as history, versions of other projects, and test
#: data.
OTHER_VERSIONS = re.compile(
    r"^(CHANGELOG\.md|tests/.*|requirements/.*|docs/design/(adr/.*|first-hour\.md))$"
)


def test_the_version_is_in_only_one_file() -> None:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], stdout=subprocess.PIPE, text=True, check=True
    )
    version = re.compile(rf"(?<![\d.]){re.escape(version_of(ROOT))}(?![\d.])")
    found = [
        name
        for name in listed.stdout.split("\0")
        if name and not OTHER_VERSIONS.match(name) and (ROOT / name).is_file()
        if version.search((ROOT / name).read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == ["pyproject.toml"]


def test_a_version_other_than_the_version_of_the_commit_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError) as rejected:
        export(ROOT, tmp_path, "99.0.0", REPOSITORY)
    own = version_of(tmp_path)
    assert f"the version of HEAD is {own}, not 99.0.0" in str(rejected.value)
    assert f"Example: make release VERSION={own}" in str(rejected.value)


def test_archives_do_not_depend_on_time_and_user(tmp_path: Path) -> None:
    files = [File("b", b"2", executable=True), File("a", b"1")]
    write_tar_gz(tmp_path / "one.tar.gz", files, 1_700_000_000)
    with tarfile.open(tmp_path / "two.tar.gz", "w:gz") as archive:
        for name, content in (("a", "1"), ("b", "2")):
            path = tmp_path / name
            path.write_text(content)
            path.chmod(0o700 if name == "b" else 0o600)
            archive.add(path, name)
    normalise(tmp_path / "two.tar.gz", 1_700_000_000)
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        members = [(each.name, each.mode, each.mtime, each.uid) for each in archive]
    assert members == [("a", 0o644, 1_700_000_000, 0), ("b", 0o755, 1_700_000_000, 0)]


def released(folder: Path, changelog: str, tagged: bool) -> Source:
    (folder / "CHANGELOG.md").write_text(changelog)
    return Source("0.2.0", 1_700_000_000, folder, tagged, "0" * 40, REPOSITORY)


def test_release_notes_are_the_changelog_section_of_the_version(tmp_path: Path) -> None:
    changelog = (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-31\n\n- New.\n\n## [0.1.0]\n"
    )
    assert notes(released(tmp_path, changelog, tagged=True)) == ("0.2.0", "- New.\n")


def test_a_commit_without_a_tag_may_have_unreleased_notes(tmp_path: Path) -> None:
    changelog = "## [Unreleased]\n\n- Next.\n"
    assert notes(released(tmp_path, changelog, tagged=False)) == ("Unreleased", "- Next.\n")
    with pytest.raises(ReleaseError, match=r"has no section 0\.2\.0 .*## \[0\.2\.0\] - "):
        notes(released(tmp_path, changelog, tagged=True))


def test_images_without_a_base_or_a_builder_are_skipped(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BASE", raising=False)
    monkeypatch.delenv("BUILDER", raising=False)
    assert build_images(source, "", tmp_path)[1].startswith("BASE is not set. Example: BASE=")
    monkeypatch.setenv("BASE", f"python:3.12-slim@sha256:{'0' * 64}")
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = build_images(source, "", tmp_path)
    assert nothing == ([], "none of docker, podman, buildah is installed")


def test_the_chart_describes_its_values_with_their_defaults() -> None:
    schema = {
        "definitions": {"r": {"properties": {"cpu": {"description": "Cores | threads."}}}},
        "properties": {"replicas": {"description": "Pods."}, "web": {"$ref": "#/definitions/r"}},
    }
    values = {"replicas": 2, "web": {}}
    assert list(rows(schema, values, schema)) == [
        ("replicas", 2, "Pods."),
        ("web.cpu", None, "Cores \\| threads."),
    ]


def test_installing_the_client_removes_files_of_earlier_releases(tmp_path: Path) -> None:
    for name in ("kubectl-headroom_old", "kubectl-headroom_new", "other_old"):
        (tmp_path / name / "site-packages").mkdir(parents=True)
        (tmp_path / f".{name}_lock").touch()
    own = tmp_path / "kubectl-headroom_new/site-packages"
    runpy.run_path(str(ROOT / "release/preamble.py"), {"site_packages": own}, "__main__")
    left = {each.name.strip(".").removesuffix("_lock") for each in tmp_path.iterdir()}
    assert left == {"kubectl-headroom_new", "other_old"}


@pytest.mark.slow
def test_two_builds_of_a_commit_have_the_same_bytes(
    packages: Packages, source: Source, tmp_path: Path
) -> None:
    before = os.umask(0o077)
    try:
        again = replace(exported(tmp_path / "source"), epoch_s=source.epoch_s)
        wheel, sdist = build_packages(again, tmp_path)
        chart = build_chart(again, "", tmp_path).read_bytes()
    finally:
        os.umask(before)
    assert wheel.read_bytes() == packages.wheel.read_bytes()
    assert sdist.read_bytes() == packages.sdist.read_bytes()
    assert build_chart(source, "", tmp_path).read_bytes() == chart


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(
    packages: Packages, source: Source, tmp_path: Path
) -> None:
    with tarfile.open(packages.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    (tmp_path / "out").mkdir()
    wheel, _ = build_packages(replace(source, folder=unpacked), tmp_path / "out")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(packages.wheel) as theirs:
        assert {each.filename: each.CRC for each in ours.infolist()} == {
            each.filename: each.CRC for each in theirs.infolist()
        }
        assert "headroom/console/page/index.html" in ours.namelist()


@pytest.mark.slow
def test_the_chart_has_a_version_a_readme_and_annotations(source: Source, tmp_path: Path) -> None:
    path = build_chart(source, "registry.example/team", tmp_path)
    assert path.name == f"headroom-{source.version}.tgz"
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    chart = tmp_path / "headroom"
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert (metadata["version"], metadata["appVersion"]) == (source.version, source.version)
    assert metadata["icon"] == f"{REPOSITORY}/raw/v{source.version}/deploy/chart/headroom/icon.svg"
    annotations = metadata["annotations"]
    assert annotations["artifacthub.io/category"] == "ai-machine-learning"
    images = yaml.safe_load(annotations["artifacthub.io/images"])
    assert images[1]["image"] == f"registry.example/team/headroom-agent:{source.version}"
    (crd,) = yaml.safe_load(annotations["artifacthub.io/crds"])
    deployed = yaml.safe_load((chart / "files/base/crd.yaml").read_text())
    assert crd["name"] == deployed["metadata"]["name"]
    assert crd["version"] in [each["name"] for each in deployed["spec"]["versions"]]
    images = [f"images.{name}.repository=r.example/{name}" for name in ("extender", "agent")]
    command = [built("helm")["helm"], "template", path, "--set", ",".join(images)]
    rendered = run(command, tmp_path)
    assert f"image: r.example/extender:{source.version}" in rendered
    assert f"image: r.example/agent:{source.version}" in rendered
    assert f"helm.sh/chart: headroom-{source.version}" in rendered
    text = (chart / "README.md").read_text()
    assert "| `scheduler.replicas` | `2` |" in text
    properties = json.loads((chart / "values.schema.json").read_text())["properties"]
    for name in properties:
        assert f"`{name}" in text, name


@pytest.mark.slow
def test_krew_accepts_the_manifest(source: Source, tmp_path: Path) -> None:
    archives = {}
    for system, machine in PLATFORMS:
        archives[system, machine] = tmp_path / f"{system}_{machine}.tar.gz"
        archives[system, machine].write_bytes(f"{system} {machine}".encode())
    path = tmp_path / "headroom.yaml"
    write_manifest(source, archives, path)
    spec = yaml.safe_load(path.read_text())["spec"]
    assert spec["version"] == f"v{source.version}"
    first = spec["platforms"][0]
    assert first["uri"] == f"{REPOSITORY}/releases/download/v{source.version}/linux_amd64.tar.gz"
    # The hash is the output of: printf "linux amd64" | sha256sum
    assert first["sha256"] == "ca40350362516cc30c839fd3e0f04e9bbb7703698fd5c57f12f3b87f07d866e9"
    path.write_text(path.read_text().replace(first["sha256"], "unknown"))
    with pytest.raises(ReleaseError, match="krew rejects"):
        validate(path)


@pytest.mark.slow
def test_the_workflows_have_no_errors() -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yaml"))
    assert [each.stem for each in workflows] == ["ci", "release"]
    linter = built("actionlint")["actionlint"]
    found = subprocess.run([linter, *workflows], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_every_action_is_pinned_by_commit_with_its_version() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yaml"):
        for line in path.read_text().splitlines():
            if "uses:" in line:
                assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_no_job_that_can_sign_runs_a_build() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    signing = {name for name, job in jobs.items() if "id-token" in job["permissions"]}
    assert signing == {"publish"}
    for name, job in jobs.items():
        builds = [step for step in job["steps"] if "setup-buildx" in step.get("uses", "")]
        builds += [
            step
            for step in job["steps"]
            if re.match("make (release|binary|publish-images)", step.get("run", ""))
        ]
        assert bool(builds) != (name in signing)
        assert "contents" in job["permissions"]
        assert (job["permissions"]["contents"] == "write") == (name in signing)


def test_the_workflows_only_run_make() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yaml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for command in (step["run"] for step in job["steps"] if "run" in step):
                targets = "test|lowest|release|binary|publish-images|publish"
                assert re.match(rf"(sudo \S+ )?make ({targets})\b", command), command
                assert len(command.replace("\\\n", "").splitlines()) == 1, command
