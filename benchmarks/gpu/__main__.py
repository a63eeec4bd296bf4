"""Checks the agent against the GPUs of this machine, without Kubernetes.

    make gpu ARGS="--only fields,init"
    python -m benchmarks.gpu [--out FOLDER] [--only LINES] [--seconds S] [--looks N] [--gpu GPU]

Every line gets a verdict: ok, differs, or not possible here with the reason. The driver's answers
and a report are written to a folder (docs/operate/gpu-check.md). The exit status is 0 if no line
differs, 1 if a line differs, 2 if there is nothing to check, and 128 + the signal after an
interruption. The check never changes MIG, persistence or compute mode, and resets nothing."""

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.children import ROOT, ChildFailed, Children
from benchmarks.gpu.fixtures import Fixtures
from benchmarks.gpu.lines import Line, NotPossible, Verdict
from benchmarks.gpu.machine import Machine, NoGpu, Options

NOTHING_STATUS = 2
RECORDED = ROOT / "tests/recorded/gpu"


#: Seconds after which an interruption without effect is tried again.
_AGAIN_S = 2.0


class Interrupted(BaseException):
    """A signal that ends the whole check."""


def main(argv: Sequence[str]) -> int:
    args = _parsed(argv)
    names = _chosen(args.only)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with tempfile.TemporaryDirectory(prefix="headroom-gpu-") as folder:
        children = Children(Path(folder), os.environ)
        try:
            options = Options(
                args.seconds, args.looks, args.deadline, args.gpu, args.gib, args.pause
            )
            return _checked(names, options, children, args.out, argv)
        except NoGpu as err:
            sys.stderr.write(f"make gpu: no GPU to check: {err}\n")
            return NOTHING_STATUS
        except Interrupted as err:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stderr.write("\ninterrupted: every process that was started is ended\n")
            return 128 + int(err.args[0])
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            children.end_all()


def _checked(
    names: Sequence[str], options: Options, children: Children, out: str, argv: Sequence[str]
) -> int:
    began_s = time.monotonic()
    fixtures = Fixtures()
    machine = Machine(options, children, fixtures, os.environ)
    folder = Path(out) if out else RECORDED / _folder_name(machine.driver, machine.model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").touch()
    except OSError as err:
        sys.stderr.write(f"make gpu: {folder}: {err.strerror}; example: --out /tmp/gpu-check\n")
        return NOTHING_STATUS
    lines = []
    for name in names:
        sys.stderr.write(f"{name} ...")
        sys.stderr.flush()
        line_began_s = time.monotonic()
        lines.append(run(name, CHECKS[name], machine))
        sys.stderr.write(f" {time.monotonic() - line_began_s:.1f} s\n")
    facts = report.Facts(
        datetime.now(UTC).date().isoformat(),
        _command(argv),
        machine.driver,
        machine.identity["cuda"],
        machine.model,
        len({d["parent"] or d["uuid"] for d in machine.devices}),
        "root" if machine.is_root else "an ordinary user",
        time.monotonic() - began_s,
        machine.busy,
    )
    recorded = fixtures.write(folder, _readme(facts))
    for name, text in (
        ("report.md", report.markdown(lines, facts, recorded)),
        ("report.json", report.as_json(lines, facts)),
    ):
        (folder / name).write_text(fixtures.anonymous(text))
    sys.stdout.write(report.table(lines, facts))
    sys.stdout.write(f"report and recorded answers: {folder}\n")
    return int(any(line.verdict is Verdict.DIFFERS for line in lines))


def run(name: str, check: Callable[[Machine], Line], machine: Machine) -> Line:
    """Return the line of one check, even if the check fails."""
    try:
        return check(machine)
    except NotPossible as err:
        return Line(name, Verdict.NOT_POSSIBLE, str(err))
    except ChildFailed as err:
        return Line(name, Verdict.DIFFERS, str(err))
    except Exception as err:  # noqa: BLE001 - the other lines still count
        where = traceback.format_exc()
        what = f"the check itself failed: {type(err).__name__}: {err}"
        return Line(name, Verdict.DIFFERS, what, {"traceback": where})


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Checks the agent against the GPUs of this machine."
    )
    parser.add_argument("--out", default="", help="folder for the report and the recorded answers")
    parser.add_argument("--only", default="", help=f"comma-separated lines: {', '.join(CHECKS)}")
    parser.add_argument(
        "--seconds", type=_positive, default=120.0, help="duration of the line cost, in s"
    )
    parser.add_argument("--looks", type=int, default=200, help="samples of the line latency")
    parser.add_argument(
        "--pause", type=_positive, default=3.0, help="pause of the line sm-activity, in s"
    )
    parser.add_argument(
        "--deadline", type=_positive, default=10.0, help="timeout of a driver call, in s"
    )
    parser.add_argument("--gpu", default="", help="index or UUID; default: an unused GPU")
    parser.add_argument(
        "--gib", type=_sizes, default=(1, 5, 10), help="sizes of the three processes, in GiB"
    )
    args = parser.parse_args(argv)
    if args.looks < 1:
        parser.error(f"--looks {args.looks} is less than 1; example: --looks 200")
    for name in _names(args.only):
        if name not in CHECKS:
            parser.error(f"--only {name}: no such line; the lines are: {', '.join(CHECKS)}")
    return args


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0; example: 120")
    return value


def _sizes(text: str) -> tuple[float, ...]:
    sizes = tuple(_positive(each) for each in text.split(","))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text} is not three sizes in GiB; example: 1,5,10")
    return sizes


def _names(only: str) -> list[str]:
    return [name.strip() for name in only.split(",") if name.strip()]


def _chosen(only: str) -> list[str]:
    wanted = _names(only)
    return [name for name in CHECKS if not wanted or name in wanted]


def _command(argv: Sequence[str]) -> str:
    """Return the command for the report, without the folder, which is a path of this machine."""
    kept = [
        word
        for before, word in zip(["", *argv], argv, strict=False)
        if before != "--out" and not word.startswith("--out")
    ]
    return shlex.join(["make", "gpu", *([f"ARGS={shlex.join(kept)}"] if kept else [])])


def _folder_name(driver: str, model: str) -> str:
    return re.sub(r"[^\w.]+", "-", f"{driver}-{model.removeprefix('NVIDIA ')}").lower()


def _readme(facts: report.Facts) -> str:
    return (
        f"# {facts.model}, driver {facts.driver}\n\n"
        f"Recorded by `{facts.command}` on {facts.date}. UUIDs are numbered, and serial numbers and"
        " process\nnames left out. `report.md` lists what was compared.\n"
    )


def _interrupt(number: int, _frame: object) -> None:
    """Raise in whatever runs, and repeat it, because Python drops exceptions in finalizers."""
    signal.signal(signal.SIGALRM, lambda *_: _interrupt(number, None))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    raise Interrupted(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
