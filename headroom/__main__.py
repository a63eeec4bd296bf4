"""Dispatches a command line to the agent, the kubectl plugin or the extender.

Users install only the client's dependencies, GPU nodes only the agent's, and other nodes only the
extender's. So the dispatcher imports none of these dependencies to choose a command, and contains
the help of all commands.
"""

import sys

#: For each heading, the commands with a line of help.
COMMANDS = {
    "See memory": {
        "top": "Show reserved, used and free memory by node, GPU, pod or model.",
        "capacity": "Count the pods of a size that fit now.",
        "quota": "List the quotas of GPU memory: used, hard and reserved.",
        "pending": "List the pods that wait for a GPU, each with what it lacks.",
    },
    "Explain decisions": {
        "why": "Explain why a pod waits or why it is on its node.",
        "score": "Explain why a pod fits on a node or not.",
        "decisions": "List decisions about pods, newest first.",
    },
    "Plan and check": {
        "whatif": "Simulate new pods and changes of nodes.",
        "defaults": "Suggest default requests of namespaces from measured use.",
        "recommend": "Recommend requests from recorded memory peaks of containers.",
        "drift": "Compare each reservation with reality.",
        "plan": "Compute from a cluster's history if sharing would save GPUs.",
        "costs": "Report the GPU hours that teams held and used, and costs.",
        "idle": "List pods that hold GPU memory but use no SM, and their costs.",
        "doctor": "Find problems that endanger pods or waste GPU memory.",
    },
    "Maintain GPUs": {
        "cordon": "Stop new pods from using GPUs of a node; --evict empties them.",
        "uncordon": "Let GPUs of a node take pods again.",
        "defrag": "Find the pods to move so that a pod fits, or a node is free.",
    },
    "Follow and report": {
        "log": "List changes: reservations, decisions, reports and devices.",
        "ui": "Show the console's page in a browser.",
        "snapshot": "Print all inputs of decisions as JSON, for a bug report.",
        "replay": "Recompute the decisions about the pods in a snapshot.",
    },
    "Install": {
        "convert": "Convert manifests of KAI, HAMi or gpushare, also to DRA claims.",
        "overlays": "Print Karpenter's NodeOverlays for GPU instance types.",
        "config": "Check settings files.",
        "certs": "Create or renew the certificates of Headroom's ports.",
        "copy-certs": "Copy certificates to a folder for kube-scheduler on a host.",
    },
    "Serve (in containers)": {
        "extender": "Serve kube-scheduler's calls.",
        "console": "Serve the debug API and its page.",
        "webhook": "Serve the admission webhook.",
        "recorder": "Record the memory peaks of containers.",
        "device-taints": "Taint DRA devices whose use exceeds their claims.",
        "agent": "Report the GPU memory of this node; --once prints it.",
        "gate": "Wait until the GPU of this pod has enough free memory.",
        "serve": "Serve extender and console; --embedded FILE needs no cluster.",
    },
}
#: Commands of ``kubectl headroom`` that ``headroom`` also has.
DEBUG_API_COMMANDS = {
    *("top", "why", "pending", "decisions", "drift", "score", "capacity", "whatif"),
    *("defaults", "quota", "costs", "idle", "recommend"),
    *("cordon", "uncordon", "defrag", "log", "snapshot", "ui"),
}
_KNOWN = {name for commands in COMMANDS.values() for name in commands}
#: Commands of the extender. They need more packages than the client has.
EXTENDER_COMMANDS = _KNOWN - DEBUG_API_COMMANDS - {"agent", "gate"}
_HELP = {"-h", "--help", "help"}


def main() -> int:
    """Run the command of the process arguments, and return its exit status.

    `headroom agent ...` and `headroom gate` run the agent's code, commands that read the debug API
    run `kubectl headroom`, and all other commands run the extender's code.
    """
    given = sys.argv[1:]
    if not given or given[0] in _HELP:
        sys.stdout.write(usage())
        return 0
    if given == ["--version"]:
        from headroom.version import own_version

        sys.stdout.write(f"headroom {own_version()}\n")
        return 0
    if given[0] == "gate":
        if len(given) > 1:
            sys.stderr.write("headroom: gate takes no arguments. Example: headroom gate\n")
            return 2
        try:
            from agent.gate_client import main as gate
        except ImportError as err:
            return _not_installed(err, "agent")
        return gate()
    if given[0] == "agent":
        return _agent(given[1:])
    # Only the commands of the debug API have options before their name.
    if given[0] in DEBUG_API_COMMANDS or given[0].startswith("-"):
        return _client()
    if given[0] not in EXTENDER_COMMANDS:
        sys.stderr.write(f"headroom: {unknown(given[0])}\n")
        return 2
    try:
        from headroom.commands import app as extender
    except ImportError as err:
        return _not_installed(err, "extender")
    extender()
    return 0


def _agent(arguments: list[str]) -> int:
    try:
        from agent.__main__ import main as agent
    except ImportError as err:
        return _not_installed(err, "agent")
    return agent(arguments)


def _client() -> int:
    try:
        from headroom.plugin import main as read
    except ImportError as err:
        return _not_installed(err, "")
    read("headroom")
    return 0


def _not_installed(err: ImportError, extra: str) -> int:
    """Report a missing package. ``extra`` is the extra that contains it, or "" for the client."""
    from headroom.not_installed import missing

    sys.stderr.write(f"headroom: {missing(err, extra)}\n")
    return 2


def usage() -> str:
    """Return the help of all commands, in groups."""
    lines = [
        "Usage: headroom COMMAND [ARGS]...",
        "",
        "  Headroom makes Kubernetes aware of GPU memory.",
    ]
    for heading, commands in COMMANDS.items():
        lines += ["", f"{heading}:"]
        lines += [f"  {name:<13}  {text}" for name, text in commands.items()]
    lines += [
        "",
        "For the options of a command: headroom COMMAND --help",
        "The first five groups, except replay, are also in kubectl headroom.",
        "For their common options, such as --context: kubectl headroom --help",
        "The others, doctor and plan: pip install 'headroom-gpu[extender]'",
        "extender, serve, agent and gate run from their images, or from a clone.",
    ]
    return "\n".join(lines) + "\n"


def unknown(command: str) -> str:
    """Return the message for a command that does not exist. It suggests the most similar one."""
    from difflib import get_close_matches

    similar = get_close_matches(command, sorted(_KNOWN), n=1)
    hint = f"Did you mean {similar[0]}?" if similar else "To list all: headroom --help"
    return f"there is no command {command!r}. {hint}"


if __name__ == "__main__":
    sys.exit(main())
