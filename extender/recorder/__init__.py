"""The recorder: keeps the memory peaks of past lives in VRAMProfiles, and writes nothing else.

``pod_facts`` reduces pods to the fields that are needed, ``life_tracker`` turns the agents' reports
into lives, ``owners`` finds the owner of a pod, ``book`` has the profiles in memory. These are
pure. ``kube_profiles`` and ``election`` call the API server, and ``rounds`` combines all.
"""
