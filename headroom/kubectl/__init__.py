"""`kubectl headroom`: shows data of the debug API at a terminal, over HTTP.

Only ``cordon`` and ``uncordon`` write to the cluster, with the user's own credentials.
"""
