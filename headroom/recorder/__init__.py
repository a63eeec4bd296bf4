"""The recorder: keeps the memory peaks of past lives in VRAMProfiles.

It writes nothing else but its Lease. ``pod_facts`` reduces pods to the fields that are needed,
``life_tracker`` turns the agents' reports into lives, ``owners`` finds the owner of a pod,
``past_lives`` turns metrics into lives, ``book`` has the profiles in memory. These are pure.
``kube_profiles`` and ``election`` call the API server, ``prometheus_history`` calls Prometheus, and
``rounds`` combines all.
"""
