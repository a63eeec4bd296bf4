"""The kubelet's device assignments, from its checkpoint and its PodResources service."""
