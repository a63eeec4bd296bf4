"""The answer of a plan in plain sentences, and its assumptions."""

import math
import statistics
from collections.abc import Iterator, Mapping

from headroom.contract.annotations import MAX_SM
from headroom.planner.decision import decision
from headroom.planner.intervals import GROWTH, LEAST_FIGURES
from headroom.planner.mig import PROFILES, USABLE, profile_of
from headroom.planner.misfits import misfits
from headroom.planner.next_steps import advice
from headroom.planner.rhythm import LONG_DAYS
from headroom.planner.savings import saved_month_cost, saved_ratio
from headroom.planner.scenarios import NO_WAIT_S
from headroom.planner.study import COMPETING, WITH_HEADROOM, Row, Study, best_row, models_of
from headroom.planner.wording import (
    first_few,
    percent_range,
    plural,
    seconds_text,
    span,
    whole,
)
from headroom.planner.workload import DAY_S, EXCLUSIVE_ABOVE, GIB, STEP_BYTES, History

#: Maximum number of workloads that a sentence lists.
_MOST_LISTED = 10


def sentences(study: Study, prices: Mapping[str, float] | None) -> list[str]:
    """Return the answer in plain sentences, most important first."""
    history, found = study.history, [_scope(study), *_left_out(study), *decision(study)]
    unshared = study.unshared.gpus_text
    work = "this work"
    if history.days > 1:
        work = f"the work of these {history.days} days"
    if unshared is None:
        found.append(
            f"Unshared, no number of nodes gives the waiting time of today's {history.gpus:,} GPUs."
        )
    else:
        wait = seconds_text(study.unshared.figures[0].today_wait_s or 0.0)
        found.append(
            f"Unshared, {work} needs {unshared} of today's {history.gpus:,} GPUs "
            f"for the same mean waiting time ({wait})."
        )
    best = best_row(study.rows)
    if best is None:
        if any(row.configuration.choice in WITH_HEADROOM for row in study.rows):
            found.append("No configuration with shared GPUs gives the same waiting time.")
    else:
        found.append(_best_sentence(study, best))
        if prices is not None:
            found += _money(study, best, prices)
    rows = study.unshared, best
    found += [row.variation.missing for row in rows if row and row.variation.missing][:1]
    found += _one_pool(study)
    found += _other_vram(study)
    found += _mig(study)
    found += _counting(study, best)
    found += _interference(study, best)
    found += _exclusive(study)
    return found


def _scope(study: Study) -> str:
    history = study.history
    peaks = [life.peak_bytes for life in history.lives if life.peak_bytes is not None]
    machines = history.machines if history.before is None else history.before
    sizes = sorted(machine.memory_bytes for machine in machines for _ in range(machine.gpus))
    when = f"Over {plural(history.days, 'day')}"
    if history.span_s < DAY_S:
        moment = len({(life.created_s, life.run_s) for life in history.lives}) == 1
        when = "At one moment" if moment else "Over less than a day"
    text = (
        f"{when}, {plural(len(history.lives), 'pod')} with a GPU ran on a cluster of "
        f"{plural(len(sizes), 'GPU')} ({plural(len(machines), 'node')})"
    )
    if peaks:
        peak, size = statistics.median(peaks) / GIB, statistics.median(sizes) / GIB
        text += f"; their median peak was {peak:.1f} of {size:.1f} GiB"
    else:
        text += "; none has a measured peak"
    if history.before is not None:
        text += (
            f". With the changes of --nodes it has {plural(history.gpus, 'GPU')} "
            f"({plural(len(history.machines), 'node')}), which count as today's"
        )
    return text + "."


def _left_out(study: Study) -> Iterator[str]:
    """Yield which pods do not count, and why."""
    yield from study.history.skipped
    if count := len(study.left_out):
        are = ("fits", "is") if count == 1 else ("fit", "are")
        yield (
            f"{plural(count, 'pod')} {are[0]} on no node of the cluster and {are[1]} left out: "
            f"{first_few(misfits(study.history))}."
        )


def _gpus(needed: str | None) -> str:
    return "1 GPU" if needed == "1" else f"{needed} GPUs"


def _best_sentence(study: Study, row: Row) -> str:
    best, needed = row.configuration, row.gpus_text
    text = (
        f"Shared by time-slicing with {best.replicas} replicas and {best.choice} placement "
        f"(vram from {best.vram.text}), the same work needs {_gpus(needed)}"
    )
    saved = saved_ratio(study, row)
    if saved is not None:
        low, high = (round(100 * each) for each in saved)
        if low > 0:
            text += f", {span(low, high)} % fewer"
        elif high <= 0:
            text += ": sharing saves none"
        else:
            text += f", between {max(0, low)} and {high} % fewer"
    return f"{text}{_lost(row)}."


def _lost(row: Row) -> str:
    """Return the end of a sentence about pods that run out of memory, or nothing."""
    if not row.loses_pods:
        return ""
    if (pods := span(*whole(row.out_of_memory))) == "1":
        return ", and 1 pod that uses more than it requests runs out of memory"
    return f", and {pods} pods that use more than they request run out of memory"


def _one_pool(study: Study) -> Iterator[str]:
    for row in study.rows:
        if row.configuration.one_pool:
            nodes = (
                f"With all pods on the same steered nodes ({row.configuration.replicas} replicas)"
            )
            needed = f"the work needs {_gpus(row.gpus_text)}"
            yield f"{nodes}, {needed if row.gpus_text else 'no number of nodes suffices'}."


def _other_vram(study: Study) -> Iterator[str]:
    for row in study.rows:
        vram = row.configuration.vram
        if vram != study.vram:
            needed = row.gpus_text
            text = f"With vram from {vram.text} it needs {_gpus(needed)}"
            if vram.source == "pod-peaks" and needed:
                text += ", which is a lower bound, because pods of one template have one request"
            elif not needed:
                text = f"With vram from {vram.text} no number of nodes suffices"
            else:
                text += _lost(row)
            if needed and row.variation.missing and not study.unshared.variation.missing:
                text += ", without a range"
            late = _unrecommended(study) if vram.source == "recommendations" else ""
            yield f"{text}.{late}"


def _unrecommended(study: Study) -> str:
    """Return a sentence with the reason why recommendations may need more GPUs than peaks."""
    lives = study.history.lives
    without = sum(life.recommended_bytes is None for life in lives)
    if not without:
        return ""
    return (
        f" {without:,} of {plural(len(lives), 'pod')} came before there was a recommendation, and "
        "keep their request."
    )


def _mig(study: Study) -> Iterator[str]:
    rows = [row for row in study.rows if row.configuration.profile is not None]
    known = [row for row in rows if None not in row.gpus]
    best = min(known, key=lambda row: row.rank, default=None)
    if best is None:
        if rows:
            yield "No MIG layout gives the same waiting time with any number of nodes."
        return
    needed = best.gpus_text
    ratios = [each.contention.lost_ratio for each in best.figures]
    slower = ", and pods lose less than 1 % of their running time"
    if not any(life.has_activity for life in study.history.lives):
        slower = ""
    elif round(100 * max(ratios)):
        slower = (
            f", and pods lose {percent_range(ratios)} of their running time because an instance "
            "has only a part of the SMs"
        )
    yield (
        f"With all shared GPUs split into MIG instances {best.configuration.profile}, which keep "
        f"pods apart, it needs {_gpus(needed)}{slower}{_lost(best)}."
    )


def _money(study: Study, row: Row, prices: Mapping[str, float]) -> Iterator[str]:
    saved = saved_month_cost(study, row, prices)
    if saved is not None:
        low, high = saved
        less = "no less" if high <= 0 else f"{span(low, high)} a month less"
        yield f"At the given prices that is {less} than unshared GPUs cost."


def _counting(study: Study, best: Row | None) -> Iterator[str]:
    rows = [row for row in study.rows if row.configuration.choice == "counting"]
    replicas = best.configuration.replicas if best else 0
    same = [row for row in rows if row.configuration.replicas == replicas]
    for row in same or rows[:1]:
        lost = row.out_of_memory
        if not lost:
            continue
        with_them = "With the same" if best else "With"
        start = f"{with_them} {row.configuration.replicas} replicas but without Headroom"
        if any(lost):
            low, high = whole(lost)
            part = 100 * high / max(1, len(study.history.lives))
            yield (
                f"{start}, {span(low, high)} pods (up to {part:.1f} % of all) would have run out "
                "of memory, because kube-scheduler counts only replicas."
            )
            continue
        text = f"{start}, no pod would have run out of memory, and the work needs "
        if best and row.gpus_ends == best.gpus_ends:
            text += f"{_gpus(row.gpus_text)}, too: all of the saving comes from sharing alone."
        else:
            text += f"{_gpus(row.gpus_text) if row.gpus_text else 'more nodes in some replays'}."
        yield (
            f"{text} Pods of another period can run out of memory, because kube-scheduler counts "
            "only replicas."
        )


def _interference(study: Study, best: Row | None) -> Iterator[str]:
    if best is None:
        return
    if not any(life.has_activity for life in study.history.lives):
        yield (
            "GPU utilization and SM activity are unknown, so the plan cannot show whether pods on "
            "one GPU would slow each other down."
        )
        return
    figures = best.figures
    worst = max(each.contention.competing_ratio for each in figures)
    if worst <= COMPETING:
        yield (
            "Pods on one GPU would compete for it during at most "
            f"{100 * worst:.1f} % of their running time."
        )
        return
    competing = percent_range([each.contention.competing_ratio for each in figures])
    lost = percent_range([each.contention.lost_ratio for each in figures])
    pairs = [f"{one} with {other}" for one, other, _ in figures[0].contention.pairs[:3]]
    often = f", most often {', '.join(pairs)}" if pairs else ""
    yield (
        f"Pods on one GPU would compete for it during {competing} of their running time{often}, "
        f"and lose {lost} of it."
    )
    for row in study.rows:
        if row.configuration.max_sm is not None:
            needed = row.gpus_text
            found = [each.contention.competing_ratio for each in row.figures if each.gpus]
            price = f"and the work needs {_gpus(needed)}" if needed else "but no number suffices"
            yield (
                f"With {MAX_SM}: {row.configuration.max_sm}% on all pods that share, they compete "
                f"during {percent_range(found)}, {price}."
            )


def _exclusive(study: Study) -> Iterator[str]:
    _, stay = advice(study.history, study.vram)
    if stay:
        names = ", ".join(f"{each.workload} ({each.reason})" for each in stay[:_MOST_LISTED])
        more = len(stay) - _MOST_LISTED
        also = f", and {more} more, which --json lists" if more > 0 else ""
        stays = "1 workload should" if len(stay) == 1 else f"{len(stay)} workloads should"
        yield f"{stays} stay exclusive: {names}{also}."


def _need_assumption(study: Study) -> Iterator[str]:
    if study.unshared.variation.reach:
        yield (
            "Ranges of GPUs, nodes, costs and savings should contain the figures of another such "
            f"period of {plural(study.history.days, 'day')} with a probability of 90 %. They allow "
            "for differences between days in pods that begin and end in the history, for chance in "
            f"independent pods, for campaigns, and for {100 * GROWTH:.0f} % of growth."
        )
        if study.history.days < LONG_DAYS:
            yield (
                f"A history shorter than {LONG_DAYS} days does not show whether the load follows a "
                "date, such as a deadline. If it does, another period can need more than the range."
            )


def _recommendations(study: Study) -> str:
    lives = study.history.lives
    below = sum((life.recommended_bytes or math.inf) < (life.peak_bytes or 0) for life in lives)
    return (
        "Recommendations are what Headroom's recorder would have computed from the lives that had "
        "ended before, if all pods of a workload ran the same program and succeeded. "
        f"{below:,} of {plural(len(lives), 'pod')} used more than was recommended."
    )


def _mig_assumptions(study: Study) -> Iterator[str]:
    models = models_of(study.history.machines)
    without = [each for each in models if not any(profile_of(each, name) for name in PROFILES)]
    if len(without) < len(models):
        yield (
            f"A MIG instance is assumed to have its share of the GPU's SMs, and {100 * USABLE:.0f} "
            "% of its share of the memory. Pods that fit on no instance keep unshared nodes."
        )
    if without:
        yield (
            f"MIG is not compared for {', '.join(without)}: NVIDIA's list of GPUs with MIG does "
            "not contain such models."
        )


def _activity_assumptions(history: History) -> Iterator[str]:
    known = sum(life.utilization_ratio is not None for life in history.lives)
    active = sum(
        life.utilization_ratio is None and life.sm_ratio is not None for life in history.lives
    )
    if known or active:
        yield (
            "Pods compete while their GPU utilizations, the time in which each runs kernels, add "
            "up to more than 100 %."
        )
    if active:
        yield (
            f"The GPU utilization of {active:,} of {len(history.lives):,} pods is unknown, so "
            "their SM activity replaces it. If their kernels use few SMs, they compete more than "
            "shown, because with time-slicing kernels of two pods never run at the same time."
        )


def assumptions(study: Study) -> list[str]:
    """Return everything that the figures assume."""
    history = study.history
    found = [*history.assumptions]
    if study.seeds == 1:
        ranges = "The only replay uses the unchanged history, so its figures have no ranges."
        if study.unshared.variation.reach:
            ranges = (
                "The only replay uses the unchanged history, so only GPUs, nodes, costs and "
                "savings have ranges."
            )
    else:
        kind = "are from the lowest to the highest figure"
        if study.seeds >= LEAST_FIGURES:
            kind = "should contain the figure of another such history with a probability of 90 %"
        ranges = (
            f"Ranges {kind}. They come from {study.seeds} replays: the unchanged history, and "
            f"{plural(study.seeds - 1, 'variant')} with resampled days and numbers of pods a day."
        )
    one_pool = ""
    if any(row.configuration.one_pool for row in study.rows):
        one_pool = (
            " With one pool, they get GPUs of their own on the shared nodes, and neither they nor "
            "the other pods wait longer on average than today."
        )
    found += [
        ranges,
        *_need_assumption(study),
        f"A mean waiting time below {NO_WAIT_S:.0f} s counts as no waiting.",
        "Each pod arrives when it was created, runs as long as it did, and uses its peak memory "
        "all the time. Sharing a GPU does not slow a pod down.",
        "Workloads with several GPUs per pod, and workloads that need more than "
        f"{100 * EXCLUSIVE_ABOVE:.0f} % of the largest GPU that they may use, keep unshared nodes."
        + one_pool,
        "Nodes are added and removed in today's mix of GPU models and sizes.",
        "A pod runs only on GPUs with at least the memory of its peak.",
        "Unshared nodes are packed as Headroom packs them. A scheduler that spreads pods needs "
        "more nodes.",
        "The device plugin takes a GPU with the fewest replicas in use, at random among equals.",
        "Replica counting spreads pods over the nodes with the most free replicas.",
        *_mig_assumptions(study),
        *_activity_assumptions(history),
    ]
    sources = [study.vram.source, *(row.configuration.vram.source for row in study.rows)]
    if "recommendations" in sources:
        found.append(_recommendations(study))
    if "peaks" in sources:
        found.append(
            "All pods of a workload request its highest measured peak plus "
            f"{100 * study.vram.margin_ratio:.0f} %, rounded up to {STEP_BYTES / GIB:.2f} GiB. If "
            "a workload does not fit with this request, it keeps unshared nodes. A pod without a "
            "measured peak counts with the highest peak of its workload."
        )
    if not history.has_workloads:
        found.append(
            "The history has no names of workloads, so each pod requests its own amount. This "
            "gives a lower bound of the need."
        )
    return found
