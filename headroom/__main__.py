"""Hands a command line to the part that it is for.

The agent is installed alone on GPU nodes and the extender where no GPU is, each with its own
dependencies: neither can import the other to hand a command on.
"""

import sys

#: The commands of ``kubectl headroom``, which ``headroom`` has as well.
READS = ("top", "why", "score", "capacity", "whatif", "drift", "log", "snapshot", "ui")


def main() -> int:
    """`headroom agent ...` and `headroom gate` are the agent's, what reads the debug API is
    `kubectl headroom`'s; all else is the extender's."""
    if sys.argv[1:] == ["gate"]:
        from agent.gate_client import main as gate

        return gate()
    if sys.argv[1:2] == ["agent"]:
        from agent.__main__ import main as agent

        return agent(sys.argv[2:])
    if sys.argv[1:2] and sys.argv[1] in READS:
        from headroom.kubectl.app import main as read

        read()
        return 0
    try:
        from extender.app.cli import main as extender
    except ImportError as err:
        sys.stderr.write(
            f"headroom: {err}; right is: pip install 'headroom-gpu[extender]',"
            " or, on a GPU node: headroom agent --once\n"
        )
        return 2
    extender()
    return 0


if __name__ == "__main__":
    sys.exit(main())
