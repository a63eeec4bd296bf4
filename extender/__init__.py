"""The scheduler extender: what kube-scheduler calls, and the ledger behind it."""
