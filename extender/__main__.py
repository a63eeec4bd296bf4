"""``python -m extender`` is ``headroom``."""

from extender.cli import main

main()
