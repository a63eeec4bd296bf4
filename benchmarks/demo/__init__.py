"""The main job without a cluster: the story of four pods, then a fleet, a referee and a table."""

from benchmarks.demo.show import run

__all__ = ["run"]
