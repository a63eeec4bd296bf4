"""Derives the owners of ReplicaSets and Jobs from their names."""

import re

#: The kinds of controllers that own ReplicaSets, by the label whose value is the suffix of the
#: ReplicaSet's name.
TEMPLATE_HASHES = {"pod-template-hash": "Deployment", "rollouts-pod-template-hash": "Rollout"}
#: The CronJob controller names a Job after the CronJob and the scheduled minute since 1970.
_OF_CRON_JOB = re.compile(r"(.+)-\d{8,10}", re.ASCII)


def cron_job_of(job: str) -> str:
    """Return the name of the CronJob that created a Job with this name, or an empty string if no
    CronJob did."""
    found = _OF_CRON_JOB.fullmatch(job)
    return found[1] if found else ""
