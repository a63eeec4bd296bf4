"""Dispatches a command line to the agent, the kubectl plugin or the extender.

GPU nodes have only the agent's dependencies, and other nodes only the extender's. So neither can
import the other to dispatch a command.
"""

import sys

#: Commands of ``kubectl headroom`` that ``headroom`` also has.
DEBUG_API_COMMANDS = {
    *("top", "why", "pending", "decisions", "drift", "score", "capacity", "whatif"),
    *("log", "snapshot", "ui"),
}


def main() -> int:
    """Run the command of the process arguments, and return its exit status.

    `headroom agent ...` and `headroom gate` run the agent's code, commands that read the debug API
    run `kubectl headroom`, and all other commands run the extender's code.
    """
    if sys.argv[1:] == ["gate"]:
        from agent.gate_client import main as gate

        return gate()
    if sys.argv[1:2] == ["agent"]:
        from agent.__main__ import main as agent

        return agent(sys.argv[2:])
    if sys.argv[1:2] and sys.argv[1] in DEBUG_API_COMMANDS:
        from headroom.kubectl.commands import main as read

        read()
        return 0
    try:
        from extender.app.cli import main as extender
    except ImportError as err:
        sys.stderr.write(
            f"headroom: {err}; install it: pip install 'headroom-gpu[extender]',"
            " or, on a GPU node, run: headroom agent --once\n"
        )
        return 2
    extender()
    return 0


if __name__ == "__main__":
    sys.exit(main())
