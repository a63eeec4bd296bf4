"""Runs the function of kube-scheduler on many pods and stores the results. See README.md."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

PODS = 150
CPUS = ["100m", "250m", "1", "1500m", "4"]
SIZES = ["64Mi", "1Gi", "1536Mi", "3G"]


def main() -> None:
    program, table = sys.argv[1:]
    dice = random.Random(1)
    pods = [pod(dice) for _ in range(PODS)]
    lines = "\n".join(map(json.dumps, pods))
    answer = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
    found = map(json.loads, answer.stdout.splitlines())
    cases = [
        {"spec": each["spec"], "status": each["status"], "requests": requests}
        for each, requests in zip(pods, found, strict=True)
    ]
    Path(table).write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


def pod(dice: random.Random) -> dict[str, Any]:
    containers = [container(dice, f"main-{index}") for index in range(dice.randint(1, 3))]
    initial = [container(dice, f"init-{index}") for index in range(dice.randint(0, 3))]
    for each in initial:
        if dice.random() < 0.5:
            each["restartPolicy"] = "Always"
    spec: dict[str, Any] = {"containers": containers, "initContainers": initial}
    if dice.random() < 0.3:
        spec["overhead"] = amounts(dice)
    if dice.random() < 0.4:
        spec["resources"] = {"requests": amounts(dice)}
    if dice.random() < 0.3:
        return {"metadata": {"name": "p"}, "spec": spec, "status": {}}
    status: dict[str, Any] = {
        "containerStatuses": [reported(dice, each) for each in containers if dice.random() < 0.8],
        "initContainerStatuses": [reported(dice, each) for each in initial if dice.random() < 0.6],
    }
    if dice.random() < 0.4:
        reason = dice.choice(["Deferred", "Infeasible", "Error"])
        status["conditions"] = [{"type": "PodResizePending", "status": "True", "reason": reason}]
    if dice.random() < 0.4:
        status["allocatedResources"] = amounts(dice)
    if dice.random() < 0.4:
        status["resources"] = {"requests": amounts(dice)} if dice.random() < 0.8 else {}
    return {"metadata": {"name": "p"}, "spec": spec, "status": status}


def container(dice: random.Random, name: str) -> dict[str, Any]:
    requests = amounts(dice)
    if dice.random() < 0.2:
        requests["nvidia.com/gpu"] = "1"
    return {"name": name, "resources": {"requests": requests}}


def reported(dice: random.Random, of: dict[str, Any]) -> dict[str, Any]:
    status: dict[str, Any] = {"name": of["name"]}
    if dice.random() < 0.7:
        status["allocatedResources"] = amounts(dice)
    if dice.random() < 0.7:
        status["resources"] = {"requests": amounts(dice)} if dice.random() < 0.9 else {}
    return status


def amounts(dice: random.Random) -> dict[str, str]:
    found = {}
    if dice.random() < 0.9:
        found["cpu"] = dice.choice(CPUS)
    if dice.random() < 0.8:
        found["memory"] = dice.choice(SIZES)
    if dice.random() < 0.1:
        found["hugepages-2Mi"] = "4Mi"
    return found


if __name__ == "__main__":
    main()
