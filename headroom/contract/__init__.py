"""The contract between extender, agent, users and Kubernetes.

Imports no other package of Headroom. Contains annotations, quantities, the GPUNode object, the
fields of Kubernetes' own objects that Headroom reads, and the closed list of reasons.
"""
