"""Checks that errors of `headroom plan` name the file or the option, with an example."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headroom.commands import app
from tests.plan.small_history import files, run

__all__ = ["files"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("5120", "much", "line 2, column peak_mib: 'much' is not a whole number. Example: 6144"),
        (",0.25,", ",1.5,", "column sm_ratio: '1.5' is not a number from 0 to 1. Example: 0.35"),
        (
            "workload,num_gpu",
            "workload,gpus",
            "line 1: column num_gpu is missing. The line has the columns name, workload, gpus",
        ),
        (
            "web-0-0,web,1",
            "web-0-0,web,1,1",
            "line 2: the number of cells is 10, not 9 as in line 1: name,workload,num_gpu",
        ),
        (
            ",0,0,3000",
            ",9,0,3000",
            "line 2: the times are not in this order: creation_time is '9', scheduled_time is '0', "
            "deletion_time is '3000'. Example: 0, 5, 3600",
        ),
        (
            ",0,0,3000",
            ",0,28.11.2026 18:30,3000",
            "column scheduled_time: '28.11.2026 18:30' is not a number of seconds or a time such "
            "as 2026-11-28T18:30:00Z. Example: 2026-11-28 18:30:00",
        ),
    ],
)
def test_errors_in_files_name_file_line_and_column(
    files: tuple[Path, Path], before: str, after: str, message: str
) -> None:
    pods, _ = files
    pods.write_text(pods.read_text().replace(before, after))
    code, text, error = run(files)
    assert (code, text) == (2, "")
    (line,) = error.splitlines()
    assert line.startswith(f"headroom: {pods}")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-choice", "magic"], "predicted, steered, mig. Example: --device-choice steered"),
        (["--replicas", "1"], "--replicas 1 is not from 2 to 64"),
        (["--seeds", "0"], "--seeds 0 is not from 1 to 100"),
        (
            ["--nodes", "pool=a"],
            "--nodes with labels is only for --prometheus; a file is read as a whole",
        ),
        (["--prometheus", "http://p"], "--pods and --prometheus are 2 sources; use only one"),
        (["--nodes", "2xL4"], "'2xL4' is not key=value. Example: --nodes pool=gpu; or to add"),
        (["--html", "/dev/null/a.html"], "--html /dev/null/a.html cannot be written: Not a direct"),
        (["--prices", "/dev/null/a"], "--prices /dev/null/a cannot be read: Not a directory. Exam"),
        (["--window", "3h"], "--window 3h is not a number of days. Example: --window 14d"),
        (
            ["--window", "14d"],
            "--window is only for --prometheus; a file is always read as a whole",
        ),
        (["--matchers", 'a="b"'], "--matchers is for --prometheus; a file is read as a whole"),
        (["--resource", "nvidia.com/a100"], "--resource is for --prometheus; a file is read as a"),
        (
            ["--vram", "half"],
            "--vram half is not one of: peaks, pod-peaks, recommendations, requests",
        ),
        (["--margin", "-1"], "--margin -1 is not from 0 to 1000"),
    ],
)
def test_invalid_options_are_rejected_with_an_example(
    files: tuple[Path, Path], arguments: list[str], message: str
) -> None:
    code, _, error = run(files, *arguments)
    assert code == 2
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a source of the history is missing. Example: headroom plan --pods pods.csv"),
        (["--pods", "p.csv"], "--pods p.csv also needs a CSV file of the nodes. Example: --machin"),
        (["--machines", "n.csv"], "a source of the history is missing"),
        (
            ["--machines", "n.csv", "--recording", "r"],
            "--machines is only for --pods: remove it, or --recording",
        ),
        (["--prometheus", "prometheus:9090"], "is not an address. Example: --prometheus http://"),
        (["--prometheus", "http://p", "--matchers", "a"], "--matchers 'a' is not a list of label"),
        (["--prometheus", "http://"], "--prometheus http:// is not an address"),
        (["--prometheus", "http://["], "--prometheus http://[ is not an address"),
    ],
)
def test_a_missing_or_wrong_source_is_reported_with_an_example(
    arguments: list[str], message: str
) -> None:
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert found.exit_code == 2
    assert message in found.stderr


@pytest.mark.parametrize(
    ("option", "content", "reason", "example"),
    [
        ("--recording", None, "cannot be read: No such file", "headroom plan record cluster.json"),
        ("--recording", "{}", "is not a recording", "headroom plan record cluster.json"),
        ("--snapshot", None, "cannot be read: No such", "kubectl headroom snapshot > cluster.json"),
        (
            "--snapshot",
            "no",
            "Input data was truncated",
            "kubectl headroom snapshot > cluster.json",
        ),
    ],
)
def test_an_unreadable_file_is_reported_with_an_example(
    tmp_path: Path, option: str, content: str | None, reason: str, example: str
) -> None:
    file = tmp_path / "given.json"
    if content is not None:
        file.write_text(content)
    found = CliRunner().invoke(app, ["plan", option, str(file)])
    assert found.exit_code == 2
    assert found.stderr.startswith(f"headroom: {option} {file}")
    assert reason in found.stderr
    assert found.stderr.rstrip().endswith(f"Example: {example}")


def test_a_second_node_with_the_same_name_is_an_error(files: tuple[Path, Path]) -> None:
    _, nodes = files
    nodes.write_text(nodes.read_text() + "n1,4,L4,23034\n")
    code, _, error = run(files)
    assert code == 2
    assert (
        f"{nodes}, line 7, column name: 'n1' is not a unique name, because an earlier row has it"
        in error
    )
    assert error.endswith("Example: node-2\n")


@pytest.mark.parametrize(
    ("option", "content", "other"),
    [
        (
            "--recording",
            '{\n"head": {"format":"headroom.gpu/snapshot/v1"}, "nodes": []}',
            "--snapshot",
        ),
        ("--snapshot", '{"started_s":1,"format":"headroom.gpu/recording/v1alpha1"}', "--recording"),
    ],
)
def test_a_file_that_belongs_to_another_option_is_recognised(
    tmp_path: Path, option: str, content: str, other: str
) -> None:
    file = tmp_path / "given.json"
    file.write_text(content)
    found = CliRunner().invoke(app, ["plan", option, str(file)])
    assert (found.exit_code, found.stderr) == (
        2,
        f"headroom: {option} {file}: this file is for {other}. Example: headroom plan {other} "
        f"{file}\n",
    )


def test_prices_must_cover_the_models(files: tuple[Path, Path], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    for content, message in (
        ("T4: 1", "model L4 has no price; the cluster has 10 of these GPUs. Example: L4: 1.20"),
        ("L4: -1", "L4: -1 is not a price per GPU and hour"),
        ("L4: cheap", "L4: 'cheap' is not a price per GPU and hour"),
        ("- L4", "is not a mapping of GPU models to prices per hour"),
        ("{", "is not YAML in UTF-8"),
    ):
        prices.write_text(content)
        code, _, error = run(files, "--prices", str(prices))
        assert code == 2
        assert message in error


def test_an_option_for_peaks_without_any_measured_peak_is_an_error(
    files: tuple[Path, Path],
) -> None:
    pods, _ = files
    pods.write_text(pods.read_text().replace(",5120,", ",,").replace(",9000,", ",,"))
    code, _, error = run(files, "--vram", "peaks")
    assert code == 2
    assert "--vram peaks: no pod of the history has a measured peak" in error
