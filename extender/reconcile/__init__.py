"""Reconciles the ledger with the cluster."""
