"""What a scrape of /metrics costs, and what kube-scheduler's calls notice of it.

    python -m benchmarks.scrape [--nodes 5000] [--gpus 8]

One replica in a process of its own serves that many nodes from memory. Filter is called all the
time, first alone and then while /metrics is scraped without a pause, which is far more often than
any Prometheus does; the same run gives both, and so their ratio.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.serving import Server, offer, pod, serving

CALLS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gpus", type=int, default=8)
    args = parser.parse_args()
    shape = f"gpus: {args.gpus}, memory: 80Gi, sharing: time-slicing, replicas: 4"
    fleet = f"nodes: [{{name: n, count: {args.nodes}, {shape}}}]\n"
    for most in (0, 2000, 100_000):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.yaml")
            config.write_text(f"device_series: {most}\n")
            with serving(fleet, "--config", str(config), "--log-level", "error") as server:
                names = [node["name"] for node in server.get("/v1/nodes").json()["nodes"]]
                scrape(server)  # the first one adds all nodes up
                with scraping(server) as (took_s, size):
                    busy_s = call(server, names)
                alone_s = call(server, names)
        say(f"{args.nodes} nodes of {args.gpus} devices, device_series {most}")
        usual_ms, most_ms = 1e3 * statistics.median(took_s), 1e3 * max(took_s)
        say(f"  {len(took_s)} scrapes of {size[-1] / 1e3:.0f} kB:")
        say(f"  p50 {usual_ms:.0f} ms, max {most_ms:.0f} ms")
        for name, quantile in (("p50", 0.5), ("p99", 0.99)):
            alone, busy = at(alone_s, quantile), at(busy_s, quantile)
            say(f"  filter {name}: {1e3 * alone:.2f} ms, {busy / alone:.2f} times during scrapes")


def call(server: Server, names: list[str]) -> list[float]:
    took_s = []
    for i in range(CALLS):
        body = offer(pod(f"p{i}", "90Gi"), *names)  # refused everywhere
        began_s = time.perf_counter()
        server.post("/filter", body)
        took_s.append(time.perf_counter() - began_s)
    return took_s


def scrape(server: Server) -> int:
    return len(server.get("/metrics").body)


@contextlib.contextmanager
def scraping(server: Server) -> Iterator[tuple[list[float], list[int]]]:
    took_s: list[float] = []
    size: list[int] = []
    done = threading.Event()

    def again() -> None:
        while not done.is_set():
            began_s = time.perf_counter()
            size.append(scrape(server))
            took_s.append(time.perf_counter() - began_s)

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield took_s, size
    finally:
        done.set()
        thread.join()


def at(took_s: list[float], quantile: float) -> float:
    return sorted(took_s)[int(quantile * (len(took_s) - 1))]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
