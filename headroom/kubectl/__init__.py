"""`kubectl headroom`: shows data of the debug API in a terminal.

Only ``cordon``, ``uncordon`` and ``defrag --apply`` write to the cluster, with the user's own
credentials.
"""
