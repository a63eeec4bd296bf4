"""The recorder, which keeps the memory peaks of past lives in VRAMProfiles.

A life is one run of a container. The recorder writes only VRAMProfiles and its Lease. ``pod_facts``
reduces pods to the fields that are needed, ``life_tracker`` turns the agents' reports into lives,
``owners`` finds the owner of a pod, ``past_lives`` turns metrics into lives, and ``profile_book``
holds the profiles in memory. These modules do no I/O. ``kube_profiles`` calls the API server,
``prometheus_history`` calls Prometheus, and ``rounds`` combines all of them.
"""
