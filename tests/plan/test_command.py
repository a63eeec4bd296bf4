"""Runs `headroom plan` on files, and checks the figures of a small history."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from benchmarks.plan import generated
from tests.plan.small_history import FEW, HOUR_S, files, run

__all__ = ["files"]


def test_the_figures_of_a_small_history(files: tuple[Path, Path], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("L4: 0.5\n")
    few = ("--replicas", "4", "--seeds", "1", "--prices", str(prices))
    code, text, _ = run(files, *few, "--json")
    assert code == 0
    data = json.loads(text)
    assert (data["days"], data["pods"], data["gpus"], data["nodes"]) == (2, 50, 10, 5)
    by_name = {each["configuration"]: each["replays"] for each in data["configurations"]}
    # Unshared, the web pods need 4 GPUs and the trainer needs 2. Shared, 1 GPU holds 4 x 5.5 GiB.
    assert [each["gpus"] for each in by_name["unshared"]] == [6]
    # 22.0 of 22.49 GiB of one GPU are used. Nodes have two GPUs, and the trainer keeps a node.
    for mode in ("predicted", "steered"):
        assert [each["gpus"] for each in by_name[f"4 replicas, {mode}"]] == [4]
        first = by_name[f"4 replicas, {mode}"][0]
        assert (first["out_of_memory_pods"], first["today_wait_s"]) == (0, 0.0)
        assert first["month_cost"] == 4 * 0.5 * 730
    assert data["exclusive_workloads"] == [{"workload": "train", "reason": "2 GPUs a pod"}]
    code, text, _ = run(files, *few)
    assert code == 0
    prose = text.partition("configuration ")[0]
    assert max(map(len, prose.splitlines())) <= 100
    lines = data["sentences"]
    assert all(line in " ".join(text.split()) for line in lines)
    assert lines[:4] == [
        "Over 2 days, 50 pods with a GPU ran on a cluster of 10 GPUs (5 nodes); their median peak "
        "was 5.0 of 22.5 GiB.",
        "The history needed 6 GPUs unshared, so keep at least 6; how many more another period "
        "needs is unknown, because there is no range. The history needed 4 GPUs shared, so keep "
        "at least 4; how many more another period needs is unknown, because there is no range.",
        "Unshared, the work of these 2 days needs 6 of today's 10 GPUs for the same mean waiting "
        "time (0 s).",
        "Shared by time-slicing with 4 replicas and predicted placement (vram from peaks + 10 %), "
        "the same work needs 4 GPUs, 33 % fewer.",
    ]
    assert data["decision"] == {
        "today_gpus": 10,
        "unshared": {
            "configuration": "unshared",
            "history_gpus": 6,
            "gpus_range": None,
            "keep_at_least_gpus": 6,
        },
        "shared": {
            "configuration": "4 replicas, predicted",
            "history_gpus": 4,
            "gpus_range": None,
            "keep_at_least_gpus": 4,
        },
    }
    assert "At the given prices that is 730 a month less than unshared GPUs cost." in lines
    assert "1 workload should stay exclusive: train (2 GPUs a pod)." in lines


def test_a_history_of_less_than_a_day_is_described_as_short(files: tuple[Path, Path]) -> None:
    pods, _ = files
    few = (*FEW, "--vram", "peaks")
    lines = pods.read_text().splitlines()
    for end, when in ((5, "At one moment, 4 pods"), (9, "Over less than a day, 8 pods")):
        pods.write_text("\n".join(lines[:end]) + "\n")
        first, _, second, third, fourth, *_ = json.loads(run(files, *few)[1])["sentences"]
        assert first.startswith(f"{when} with a GPU ran on a cluster of 10 GPUs")
        assert second.startswith("Unshared, this work needs 4 of today's 10 GPUs")
        assert third.startswith("Figures have no ranges. Ranges need 7 days and 40 pods")
        # No mode of Headroom was requested.
        assert fourth.startswith("With 4 replicas but without Headroom, no pod would have run out")


@pytest.mark.slow
def test_ranges_cover_all_replays(files: tuple[Path, Path], tmp_path: Path) -> None:
    (pods, _), html = files, tmp_path / "report.html"
    at = 28 * HOUR_S
    more = [f"more-{n},web,1,-1,5120,0.25,{at},{at},{at + 3000}" for n in range(3)]
    pods.write_text(pods.read_text() + "\n".join(more) + "\n")
    few = ("--replicas", "4", "--device-choice", "steered", "--seeds", "4")
    data = json.loads(run(files, *few, "--html", str(html), "--json")[1])
    unshared = [each["gpus"] for each in data["configurations"][0]["replays"]]
    assert unshared[0] == 8  # Seven concurrent pods on nodes with two GPUs.
    assert len(unshared) == 4
    assert len(set(unshared)) > 1  # The number of pods varies by chance.
    # Two days are too few for a range of needs, so the recorded history counts.
    assert "needs 8 of today's 10 GPUs" in data["sentences"][2]
    assert data["configurations"][0]["gpus_range"] is None
    assert data["configurations"][0]["no_range_because"] == data["sentences"][4]
    assert any(
        "with a probability of 90 %. They come from 4 replays" in each
        for each in data["assumptions"]
    )
    assert "<p>Bars are dark up to the low end of a range, and pale" in html.read_text()


@pytest.mark.slow
def test_a_saving_that_only_some_replays_have_starts_at_0(tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("L40S: 1.2\n")
    # Some pods run all the time, because few short ones have no range.
    stay = [
        generated.Row(f"stay-{n}", "stay", 1, 44_000, 0.1, 0, 8 * generated.DAY_S) for n in range(3)
    ]
    files = generated.write(tmp_path, [*stay, *generated.rows(8, 108, 0.1)], 9)
    few = ("--replicas", "4", "--device-choice", "predicted", "--vram", "pod-peaks", "--seeds", "2")
    once = json.loads(run(files, *few, "--seeds", "1", "--json")[1])
    low, high = once["configurations"][0]["gpus_range"]
    assert low < high
    assert any("only GPUs, nodes, costs and savings have ranges" in a for a in once["assumptions"])
    assert any("whether the load follows a date" in each for each in once["assumptions"])
    data = json.loads(run(files, *few, "--prices", str(prices), "--json")[1])
    unshared, shared = (
        [each["month_cost"] for each in configuration["replays"]]
        for configuration in data["configurations"][:2]
    )
    assert unshared[0] == shared[0]
    saved = unshared[1] - shared[1]
    assert f"that is 0 to {saved:,.0f} a month less than unshared" in data["sentences"][4]
    low, high = data["configurations"][1]["saved_month_cost_range"]
    assert (low, round(high)) == (0, round(saved))
    low, high = data["configurations"][1]["saved_ratio_range"]
    assert low < 0 < high < 1
    assert data["configurations"][0]["saved_ratio_range"] == [0, 0]


class _Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


@pytest.mark.slow
def test_the_page_has_all_figures_and_loads_no_other_file(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    pods, _ = files
    # Four pods of 12 GiB on two GPUs. The name of the workload is escaped.
    pods.write_text(pods.read_text().replace(",5120,", ",12000,").replace(",train,", ",<b>train,"))
    html = tmp_path / "report.html"
    few = ("--replicas", "2", "--device-choice", "predicted", "--seeds", "1", "--json")
    run(files, *few, "--html", str(html))
    assert "Next steps" not in _Page(html.read_text()).words  # No GPU is saved.
    few = FEW
    data = json.loads(run(files, *few, "--html", str(html))[1])
    page = _Page(html.read_text())
    assert page.open == []
    # The configuration that loses pods has short bars, but they are red and name the lost pods.
    assert [a.get("class") for tag, a in page.elements if tag == "svg"][:2] == [None, "bad"]
    assert "4; 24 pods run out of memory" in page.words
    assert any("Red configurations are no choice" in words for words in page.words)
    for sentence in [*data["sentences"], *data["assumptions"]]:
        assert sentence in page.words
    assert any("<b>train (2 GPUs a pod)" in words for words in page.words)
    loading = {"src", "href", "srcset", "data", "action", "background"}
    assert not any(loading & attributes.keys() for _, attributes in page.elements)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.elements}
    style = html.read_text().partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    captions = [at for at, words in enumerate(page.words) if words.startswith("GPUs for the same")]
    assert captions
    bars = [a for tag, a in page.elements if tag == "rect" and a.get("class") == "low"]
    # GPUs: 6 unshared, 4 counted. Pods out of memory: 0 and 24.
    assert [bar["width"] for bar in bars[:2]] == ["100.0%", "66.7%"]
    assert [bar["width"] for bar in bars[4:]] == ["0.0%", "100.0%"]


@pytest.mark.slow
def test_next_steps_are_sorted_by_the_memory_gained(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    pods, _ = files
    more = [
        f"ml/app-{n},ml/app,1,-1,2000,0.1,{n * HOUR_S},{n * HOUR_S},{n * HOUR_S + 60}"
        for n in range(3)
    ]
    pods.write_text(pods.read_text() + "\n".join(more) + "\n")
    html = tmp_path / "report.html"
    few = ("--replicas", "4", "--device-choice", "steered", "--seeds", "1", "--vram", "peaks")
    steps = json.loads(run(files, *few, "--json", "--html", str(html))[1])["next_steps"]
    assert [(each["workload"], each["pods"]) for each in steps["annotate"]] == [
        ("web", 48),
        ("ml/app", 3),
    ]
    assert steps["annotate"][0]["annotation"] == "headroom.gpu/vram: 5632Mi"  # 5 GiB + 10 %
    assert steps["annotate"][1]["annotation"] == "headroom.gpu/vram: 2304Mi"  # 2200 MiB, rounded
    # 48 pods run for 3000 s and leave 23034 - 5632 MiB each. The last pod is created after 44
    # hours.
    gained = 48 * 3000 * (23034 - 5632) * (1 << 20) / (44 * HOUR_S)
    assert steps["annotate"][0]["gained_bytes"] == pytest.approx(gained, rel=1e-6)
    assert steps["namespaces"] == [
        {"namespace": "ml", "annotation": "headroom.gpu/default-vram: 2304Mi"}
    ]
    config_map = yaml.safe_load(steps["plugin_config"])
    assert (config_map["kind"], list(config_map["data"])) == ("ConfigMap", ["gpu-4"])
    plugin = yaml.safe_load(config_map["data"]["gpu-4"])
    assert plugin["sharing"]["timeSlicing"]["resources"] == [
        {"name": "nvidia.com/gpu", "replicas": 4}
    ]
    text = run(files, *few)[1]
    assert "web     headroom.gpu/vram: 5632Mi  # 15.4 GiB free for others on average" in text
    assert "replicas: 4" in text
    page = _Page(html.read_text())
    assert any("vram: 5632Mi  # 15.4 GiB free" in words for words in page.words)


@pytest.mark.slow
def test_contention_is_shown_with_an_sm_limit_and_its_price(files: tuple[Path, Path]) -> None:
    pods, _ = files
    few = ("--replicas", "4", "--device-choice", "steered", "--seeds", "1", "--vram", "peaks")
    pods.write_text(pods.read_text().replace(",0.25,", ",0.2,"))  # Four pods use 0.8 of a GPU.
    data = json.loads(run(files, *few, "--json")[1])
    found = {each["configuration"]: each["replays"][0] for each in data["configurations"]}
    assert found["4 replicas, steered"]["competing_ratio"] == 0.0
    (sentence,) = [each for each in data["sentences"] if "compete" in each]
    assert sentence == (
        "Pods on one GPU would compete for it during at most 0.0 % of their running time."
    )
    pods.write_text(pods.read_text().replace(",0.2,", ",0.6,"))
    data = json.loads(run(files, *few, "--json")[1])
    found = {each["configuration"]: each["replays"][0] for each in data["configurations"]}
    busy = found["4 replicas, steered"]
    assert busy["gpus"] == 4
    assert busy["competing_ratio"] == 1.0  # Four pods on one GPU use 2.4.
    assert busy["lost_ratio"] == pytest.approx(1 - 1 / 2.4, abs=1e-4)
    limited = found["4 replicas, steered, max-sm 40 %"]
    assert (limited["gpus"], limited["competing_ratio"]) == (6, 0.0)
    words = " ".join(data["sentences"])
    most = "during 100 % of their running time, most often web with web, and lose 58 % of it."
    assert most in words
    limit = "With headroom.gpu/max-sm: 40% on all pods that share, they compete during 0 %, "
    assert limit in words
    assert "and the work needs 6 GPUs." in words
    # dcgm-exporter only reports GPU utilization here, not SM activity.
    pods.write_text(pods.read_text().replace(",sm_ratio", ",utilization_ratio"))
    lines = run(files, *few)[1].splitlines()
    (row,) = [each for each in lines if each.startswith("4 replicas, steered  ")]
    assert re.search(r"  unknown +100 %  +0$", row), row


@pytest.mark.slow
def test_two_processes_compute_the_same_figures(files: tuple[Path, Path]) -> None:
    few = ("--replicas", "2", "--device-choice", "steered", "--seeds", "2", "--json")
    assert run(files, *few)[1] == run(files, *few, "--processes", "2")[1]


@pytest.mark.slow
def test_replica_counting_loses_pods_that_headroom_keeps(
    files: tuple[Path, Path],
) -> None:
    pods, _ = files
    pods.write_text(pods.read_text().replace(",5120,", ",12000,"))
    _, text, _ = run(files, "--replicas", "4", "--seeds", "1", "--json")
    by_name = {
        each["configuration"]: each["replays"][0] for each in json.loads(text)["configurations"]
    }
    # Two pods of 12 GiB share one GPU of 22.5 GiB. Each time, two of four run out of memory.
    assert by_name["4 replicas, counted only"]["gpus"] == 4
    assert by_name["4 replicas, counted only"]["out_of_memory_pods"] == 24
    assert by_name["4 replicas, steered"]["gpus"] == 6
    assert by_name["4 replicas, steered"]["out_of_memory_pods"] == 0


def test_pods_that_need_almost_a_whole_gpu_stay_exclusive(files: tuple[Path, Path]) -> None:
    pods, _ = files
    pods.write_text(pods.read_text().replace(",5120,", ",18000,"))
    data = json.loads(
        run(files, "--replicas", "4", "--device-choice", "counting", "--seeds", "1", "--json")[1]
    )
    assert data["exclusive_workloads"] == [
        {"workload": "web", "reason": "needs 19.5 GiB"},
        {"workload": "train", "reason": "2 GPUs a pod"},
    ]
    (shared,) = data["configurations"][1]["replays"]
    assert (shared["gpus"], shared["out_of_memory_pods"]) == (6, 0)


@pytest.mark.slow
def test_the_margin_is_part_of_the_request(files: tuple[Path, Path]) -> None:
    few = ("--replicas", "4", "--device-choice", "steered", "--seeds", "1", "--json")
    narrow = json.loads(run(files, *few)[1])
    wide = json.loads(run(files, *few, "--margin", "60")[1])  # 8 GiB, so two on a GPU
    assert narrow["configurations"][1]["replays"][0]["gpus"] == 4
    assert wide["configurations"][1]["replays"][0]["gpus"] == 4
    wider = json.loads(run(files, *few, "--margin", "130")[1])  # 11.5 GiB, so one on a GPU
    assert wider["configurations"][1]["replays"][0]["gpus"] == 6


@pytest.mark.slow
def test_requests_from_other_sources_are_compared(files: tuple[Path, Path]) -> None:
    few = ("--replicas", "4", "--device-choice", "steered", "--seeds", "1", "--json")
    data = json.loads(run(files, *few, "--vram", "peaks", "--vram", "recommendations")[1])
    found = {each["configuration"]: each["replays"][0] for each in data["configurations"]}
    assert list(found)[:3] == [
        "unshared",
        "4 replicas, steered",
        "4 replicas, steered, vram from recommendations",
    ]
    # The first four pods have no recommendation and keep whole GPUs, like the trainer. They need
    # three nodes. The others share a node.
    recommended = found["4 replicas, steered, vram from recommendations"]
    assert (recommended["gpus"], recommended["out_of_memory_pods"]) == (8, 0)
    # Both trainers also start too early for a recommendation.
    assert (
        "With vram from recommendations it needs 8 GPUs. 6 of 50 pods came before there was a "
        "recommendation, and keep their request." in data["sentences"]
    )
    (note,) = [each for each in data["assumptions"] if each.startswith("Recommendations are")]
    assert note.endswith("0 of 50 pods used more than was recommended.")
    default = json.loads(run(files, *few)[1])
    assert [each["vram"] for each in default["configurations"]] == [
        "peaks + 10 %",  # unshared
        "peaks + 10 %",
        "recommendations",
        "peaks + 10 %",  # one pool
    ]
