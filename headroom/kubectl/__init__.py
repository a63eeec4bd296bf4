"""`kubectl headroom`: shows data of the debug API at a terminal, over HTTP.

Only ``cordon``, ``uncordon`` and ``defrag --apply`` write to the cluster, with the user's own
credentials.
"""
