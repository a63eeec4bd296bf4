"""Serves kube-scheduler's calls filter, prioritize, preempt and bind over HTTP."""
