"""`headroom plan`: reads a history, replays it, and prints the report."""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import structlog
import typer

from headroom.contract.printable import printable, printable_json, printable_lines
from headroom.core.journal.dump import inputs_of
from headroom.errors import BadSettings
from headroom.planner.csv_source import read_history
from headroom.planner.html_report import as_html
from headroom.planner.mig import PROFILES, split_by_mig
from headroom.planner.node_changes import with_changes
from headroom.planner.prices import read_prices
from headroom.planner.recommended import with_recommendations
from headroom.planner.recording import history_of, history_of_snapshot, read_recording
from headroom.planner.report import as_data, as_text
from headroom.planner.scenarios import Configuration
from headroom.planner.study import models_of, run_study
from headroom.planner.workload import History, Vram, with_workloads
from headroom.runtime.promql import EVERY_CLUSTER, Queries, check_matchers

DEVICE_CHOICES = ("counting", "predicted", "steered", "mig")
#: Numbers of replicas to compare by default. Each of them needs a search.
REPLICAS = tuple(range(2, 9))
_MOST_REPLICAS, _MOST_SEEDS = 64, 100
_MOST_DAYS, _MOST_DIGITS = 366, 3
_WINDOW = "14d"
#: Maps each option to a text that must occur in the first ``_BEGINNING`` bytes of its files.
_MARKS = {"--snapshot": b"headroom.gpu/snapshot/", "--recording": b"headroom.gpu/recording/"}
_BEGINNING = 200

app = typer.Typer(invoke_without_command=True)


@app.callback()
def plan(
    command: typer.Context,
    pods: Annotated[
        Path | None, typer.Option(help="CSV file of pods; docs/design/plan.md lists the columns.")
    ] = None,
    machines: Annotated[Path | None, typer.Option(help="CSV of nodes with GPUs.")] = None,
    prometheus: Annotated[
        str | None,
        typer.Option(help="URL of a Prometheus with kube-state-metrics and dcgm-exporter."),
    ] = None,
    matchers: Annotated[
        str | None,
        typer.Option(
            help='Matchers that select the cluster, if Prometheus has several: cluster="eu-1".'
        ),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            help="Extended resource that is a GPU in --prometheus; a trailing * matches any "
            f"suffix. Can be repeated; default: {', '.join(EVERY_CLUSTER.resources)}."
        ),
    ] = None,
    recording: Annotated[
        Path | None, typer.Option(help="Recording made by `headroom plan record FILE`.")
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(help="File of `kubectl headroom snapshot`; only one moment."),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help=f"Days to read from Prometheus; default: {_WINDOW}.")
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="pool=gpu: read only nodes with these labels. +4xL40S: add 4 nodes with this GPU "
            "model. +4x8xL40S:46068Mi: also give the GPUs of each node and the memory of a GPU. "
            "-gpu-a: remove node gpu-a. Can be repeated."
        ),
    ] = None,
    device_choice: Annotated[
        list[str] | None,
        typer.Option(
            help=f"How GPUs are chosen: {', '.join(DEVICE_CHOICES)}. Can be repeated; default: all."
        ),
    ] = None,
    replicas: Annotated[
        list[int] | None, typer.Option(help="Replicas of each GPU. Can be repeated.")
    ] = None,
    vram: Annotated[
        list[str] | None,
        typer.Option(
            help="Source of requests: peaks (each workload's highest peak), pod-peaks (each pod's "
            "own peak, a lower bound), recommendations or requests. Can be repeated: the first is "
            "used for all configurations, the others only for the best configuration."
        ),
    ] = None,
    margin: Annotated[float, typer.Option(help="Margin added to each peak, in percent.")] = 10.0,
    prices: Annotated[
        Path | None, typer.Option(help="YAML of GPU models with their price per GPU and hour.")
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            help="Replays of each configuration. All but the first use randomly drawn days."
        ),
    ] = 5,
    processes: Annotated[
        int | None, typer.Option(help="Replays that run at once; default: one per core.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also write the report as one HTML page to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compute from a cluster's own history how many GPUs its pods need, shared and unshared.

    Replays the lives of pods through Headroom's own placement. Needs no cluster and no GPU.
    """
    if command.invoked_subcommand is not None:
        return
    try:
        changes = [each for each in nodes or () if each.startswith(("+", "-"))]
        selectors = [each for each in nodes or () if each not in changes]
        labels = {key: value for each in selectors for key, value in _labels(each).items()}
        files = {"--pods": pods, "--recording": recording, "--snapshot": snapshot}
        days = _days(window or _WINDOW)
        if window is not None and prometheus is None:
            raise BadSettings("--window is only for --prometheus; a file is always read as a whole")
        queries = _queries(prometheus, matchers, resource)
        history = _history(files, machines, prometheus, days, labels, queries)
        history = with_workloads(with_recommendations(with_changes(history, changes)))
        sources = _vrams(history, vram, margin)
        configurations = _configurations(device_choice, replicas, sources[0], history)
        if not 1 <= seeds <= _MOST_SEEDS:
            raise BadSettings(f"--seeds {seeds} is not from 1 to {_MOST_SEEDS}. Example: --seeds 5")
        costs = None
        if prices is not None:
            costs = read_prices(prices, models_of(history.machines))
        if html is not None:
            _check_writable(html)
        cores = processes if processes is not None else len(os.sched_getaffinity(0))
        study = run_study(history, configurations, sources, seeds, max(1, cores), _report_progress)
        if html is not None:
            html.write_text(as_html(study, costs, "Would sharing save GPUs?"), encoding="utf-8")
    except (BadSettings, OSError) as err:
        typer.echo(printable(f"headroom: {err}"), err=True)
        raise typer.Exit(2) from err
    if as_json:
        typer.echo(printable_json(json.dumps(as_data(study, costs), indent=1)))
    else:
        typer.echo(printable_lines(as_text(study, costs)))


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="File to record to, or to continue.")],
    kubeconfig: Annotated[
        str | None, typer.Option(help="Path of the kubeconfig. Default: the same as kubectl.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig.")] = None,
) -> None:
    """Record pods with a GPU and nodes until stopped, for `headroom plan --recording FILE`.

    Needs permission to list and watch pods, nodes and, if they exist, gpunodes.headroom.gpu.
    """
    try:
        try:  # its packages are optional
            from headroom.planner.cluster_recorder import record_to
        except ImportError as err:
            raise BadSettings(f"{err}; install it: pip install 'headroom-gpu[extender]'") from err
        # Do not log as JSON, because the recorder reports failed calls as sentences.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
        record_to(file, kubeconfig, context)
    except (BadSettings, OSError) as err:
        typer.echo(printable(f"headroom: {err}"), err=True)
        raise typer.Exit(2) from err


def _history(
    files: Mapping[str, Path | None],
    machines: Path | None,
    prometheus: str | None,
    days: int,
    labels: Mapping[str, str],
    queries: Queries,
) -> History:
    given = [option for option, file in files.items() if file is not None]
    given += ["--prometheus"] if prometheus is not None else []
    if len(given) > 1:
        raise BadSettings(f"{' and '.join(given)} are {len(given)} sources; use only one")
    if machines is not None and files["--pods"] is None and given:
        raise BadSettings(f"--machines is only for --pods: remove it, or {given[0]}")
    if prometheus is not None:
        if not _is_address(prometheus):
            raise BadSettings(
                f"--prometheus {prometheus} is not an address. Example: --prometheus "
                "http://prometheus.monitoring:9090"
            )
        return _from_prometheus(prometheus, days, labels, queries)
    if labels:
        raise BadSettings("--nodes with labels is only for --prometheus; a file is read as a whole")
    for option, file in files.items():
        if file is not None and option != "--pods":
            return _from_file(option, file)
    pods = files["--pods"]
    if pods is not None and machines is None:
        raise BadSettings(
            f"--pods {pods} also needs a CSV file of the nodes. Example: --machines nodes.csv"
        )
    if pods is None or machines is None:
        raise BadSettings(
            "a source of the history is missing. Example: headroom plan --pods pods.csv "
            "--machines nodes.csv; or headroom plan --prometheus http://prometheus:9090"
        )
    return read_history(pods, machines)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _check_writable(html: Path) -> None:
    """Raise ``BadSettings`` now if the page could not be written after the replays."""
    try:
        html.open("a").close()
    except OSError as err:
        raise BadSettings(
            f"--html {html} cannot be written: {err.strerror}. Example: --html report.html"
        ) from err


def _from_file(option: str, file: Path) -> History:
    command = "kubectl headroom snapshot >" if option == "--snapshot" else "headroom plan record"
    example = f"Example: {command} cluster.json"
    try:
        if option == "--snapshot":
            return history_of_snapshot(inputs_of(file.read_bytes(), str(file)))
        return history_of(read_recording(file))
    except OSError as err:
        raise BadSettings(f"{option} {file} cannot be read: {err.strerror}. {example}") from err
    except BadSettings as err:
        beginning = file.read_bytes()[:_BEGINNING]
        for other, mark in _MARKS.items():
            if other != option and mark in beginning:
                raise BadSettings(
                    f"{option} {file}: this file is for {other}. Example: headroom plan {other} "
                    f"{file}"
                ) from err
        found = str(err).removeprefix(f"{file}: ")
        text = found if "Example: " in found else f"{found}. {example}"
        raise BadSettings(f"{option} {file}: {text}") from err


def _queries(
    prometheus: str | None, matchers: str | None, resources: Sequence[str] | None
) -> Queries:
    for option, given in (("--matchers", matchers), ("--resource", resources)):
        if given and prometheus is None:
            raise BadSettings(f"{option} is for --prometheus; a file is read as a whole")
    try:
        text = check_matchers(matchers or "")
    except ValueError as err:
        raise BadSettings(f"--matchers {err}") from err
    return Queries(text, resources or EVERY_CLUSTER.resources)


def _from_prometheus(url: str, days: int, labels: Mapping[str, str], queries: Queries) -> History:
    try:  # its packages are optional
        from headroom.planner.prometheus_source import read_prometheus
    except ImportError as err:
        raise BadSettings(f"{err}; install it: pip install 'headroom-gpu[extender]'") from err
    return read_prometheus(url, days, labels, queries=queries)


def _days(window: str) -> int:
    """Return the number of days of a window such as 14d or 2w. Raises ``BadSettings``."""
    unit = {"d": 1, "w": 7}.get(window[-1:])
    count = window[:-1]
    if unit is None or not (count.isascii() and count.isdigit()) or len(count) > _MOST_DIGITS:
        raise BadSettings(f"--window {window} is not a number of days. Example: --window 14d")
    if not 1 <= (days := int(count) * unit) <= _MOST_DAYS:
        raise BadSettings(f"--window {window} is not from 1d to {_MOST_DAYS}d. Example: 14d")
    return days


def _labels(selector: str) -> dict[str, str]:
    """Return the labels of a selector under the names that kube-state-metrics gives them."""
    found: dict[str, str] = {}
    for part in filter(None, selector.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key or not value:
            raise BadSettings(
                f"--nodes {selector}: {part!r} is not key=value. Example: --nodes pool=gpu; or to "
                "add nodes: --nodes +4xL40S; or to remove one: --nodes -gpu-a"
            )
        found["label_" + re.sub(r"[^a-zA-Z0-9_]", "_", key.strip())] = value.strip()
    return found


def _vrams(history: History, given: list[str] | None, margin: float) -> list[Vram]:
    """Return the sources of requests. The first is used for all configurations.

    The default is every source for which the history has data, in the order of ``known``.
    """
    if not 0 <= margin <= 1000:
        raise BadSettings(f"--margin {margin:g} is not from 0 to 1000. Example: --margin 10")
    lives = history.lives
    known = {
        "peaks": any(life.peak_bytes is not None for life in lives),
        "pod-peaks": any(
            life.largest is not None and life.peak_bytes not in (None, life.largest.peak_bytes)
            for life in lives
        ),
        "recommendations": any(life.recommended_bytes is not None for life in lives),
        "requests": any(life.request_bytes is not None for life in lives),
    }
    for source in given or ():
        if source not in known:
            raise BadSettings(
                f"--vram {source} is not one of: {', '.join(known)}. Example: --vram peaks"
            )
        if source != "requests" and not known[source]:
            why = {
                "peaks": "a measured peak",
                "pod-peaks": "a lower peak than another pod of its workload",
            }.get(source, "three earlier pods of its workload")
            raise BadSettings(
                f"--vram {source}: no pod of the history has {why}. Example: --vram requests"
            )
    default = [source for source, has in known.items() if has] or ["requests"]
    return [
        Vram(source, margin / 100 if source.endswith("peaks") else 0.0)
        for source in dict.fromkeys(given or default)
    ]


def _configurations(
    choices: list[str] | None, replicas: list[int] | None, vram: Vram, history: History
) -> list[Configuration]:
    for choice in choices or ():
        if choice not in DEVICE_CHOICES:
            raise BadSettings(
                f"--device-choice {choice} is not one of: {', '.join(DEVICE_CHOICES)}. "
                "Example: --device-choice steered"
            )
    for count in replicas or ():
        if not 2 <= count <= _MOST_REPLICAS:
            raise BadSettings(
                f"--replicas {count} is not from 2 to {_MOST_REPLICAS}; unshared GPUs are always "
                "in the report. Example: --replicas 4"
            )
    found = [
        Configuration(choice, count, vram)
        for choice in dict.fromkeys(choices or DEVICE_CHOICES)
        for count in dict.fromkeys(replicas or REPLICAS)
        if choice != "mig"
    ]
    if "mig" in (choices or DEVICE_CHOICES):
        profiles = [each for each in PROFILES if split_by_mig(history.machines, each)]
        if choices and not profiles:
            raise BadSettings(
                "--device-choice mig: no GPU of the cluster supports MIG. Its models: "
                f"{', '.join(models_of(history.machines))}. Example: --device-choice steered"
            )
        found += [Configuration("mig", 1, vram, profile) for profile in profiles]
    return found


def _report_progress(step: str) -> None:
    """Show the latest step on a terminal, on a single line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{step}")
        sys.stderr.flush()
