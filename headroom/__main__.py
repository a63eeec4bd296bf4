"""Dispatches a command line to the agent, the kubectl plugin or the extender.

Users have only the client's dependencies, GPU nodes only the agent's, and other nodes only the
extender's. So none of them can import another to dispatch a command.
"""

import sys

#: Commands of ``kubectl headroom`` that ``headroom`` also has.
DEBUG_API_COMMANDS = {
    *("top", "why", "pending", "decisions", "drift", "score", "capacity", "whatif"),
    *("log", "snapshot", "ui"),
}
#: Commands of the extender, which need more packages than the client has.
EXTENDER_COMMANDS = {
    *("serve", "extender", "console", "webhook", "doctor", "convert", "replay", "config"),
    *("certs", "copy-certs"),
}
_SERVERS = (
    "The servers need more packages: pip install 'headroom-gpu[extender]', or on a GPU node "
    "'headroom-gpu[agent]'."
)


def main() -> int:
    """Run the command of the process arguments, and return its exit status.

    `headroom agent ...` and `headroom gate` run the agent's code, commands that read the debug API
    run `kubectl headroom`, and all other commands run the extender's code. If the extender's
    packages are not installed, only `kubectl headroom` remains.
    """
    given = sys.argv[1:]
    if given == ["--version"]:
        from headroom.version import own_version

        sys.stdout.write(f"headroom {own_version()}\n")
        return 0
    if given == ["gate"]:
        from agent.gate_client import main as gate

        return gate()
    if given[:1] == ["agent"]:
        return _agent(given[1:])
    if given and given[0] in DEBUG_API_COMMANDS:
        return _client()
    try:
        from extender.app.cli import main as extender
    except ImportError as err:
        if given and given[0] in EXTENDER_COMMANDS:
            return _not_installed(err, "extender", "on a GPU node, run: headroom agent --once")
        return _client()
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
        from headroom.kubectl.commands import app
        from headroom.kubectl.commands import main as read
    except ImportError as err:
        return _not_installed(err, "")
    app.info.epilog = _SERVERS
    read()
    return 0


def _not_installed(err: ImportError, extra: str, otherwise: str = "") -> int:
    """Report a missing package, and the extra that contains it; "" is the client."""
    package = f"'headroom-gpu[{extra}]'" if extra else "headroom-gpu"
    also = f", or, {otherwise}" if otherwise else ""
    sys.stderr.write(f"headroom: {err}; install it: pip install {package}{also}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
