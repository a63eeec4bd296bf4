"""The Kubernetes API: clients, reflectors, and the resources that Headroom watches."""
