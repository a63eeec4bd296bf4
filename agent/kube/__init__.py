"""The agent's client of the Kubernetes API."""
