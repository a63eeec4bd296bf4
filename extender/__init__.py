"""Headroom's scheduler extender, which kube-scheduler calls, and the ledger of reservations that it
uses."""
