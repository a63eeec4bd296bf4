"""Prices of GPUs: reads the user's file, and computes the cost of machines."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from headroom.errors import BadSettings
from headroom.planner.workload import model_named

#: Average number of hours in a month.
MONTH_H = 730
EXAMPLE = "L40S: 1.20"


def read_prices(path: Path, models: Mapping[str, int]) -> dict[str, float]:
    """Return the price of one GPU per hour for each model, from a YAML mapping.

    ``models`` are the models that need a price. The file may name a model by one of its words, such
    as L40S for NVIDIA L40S. Raises ``BadSettings`` if a price is missing or invalid.
    """
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise BadSettings(f"{path}: is not YAML in UTF-8: {err}") from err
    except OSError as err:
        raise BadSettings(
            f"--prices {path} cannot be read: {err.strerror}. Example of its content: {EXAMPLE}"
        ) from err
    if not isinstance(given, dict):
        raise BadSettings(
            f"{path}: is not a mapping of GPU models to prices per hour. Example: {EXAMPLE}"
        )
    prices: dict[str, float] = {}
    for model in sorted(models):
        named = [model] if model in given else [k for k in given if model_named([model], str(k))]
        if len(named) != 1:
            has = "more than one price" if named else "no price"
            raise BadSettings(
                f"{path}: model {model} has {has}; the cluster has {models[model]} of these GPUs. "
                f"Example: {model}: 1.20"
            )
        price = given[named[0]]
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < 1e6:
            raise BadSettings(
                f"{path}: {model}: {price!r} is not a price per GPU and hour. Example: {EXAMPLE}"
            )
        prices[model] = float(price)
    return prices


def monthly(gpus: Mapping[str, int], prices: Mapping[str, float]) -> float:
    """Return the cost of these GPUs (model -> number) in a month of 730 hours."""
    return sum(count * prices[model] for model, count in gpus.items()) * MONTH_H
