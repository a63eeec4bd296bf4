"""Reads kubeconfigs, credentials, errors and watches for all clients of the API server."""
