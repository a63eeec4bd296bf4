"""The contract between extender, agent, users and Kubernetes.

This package imports no other package of Headroom. It contains annotations, quantities, the GPUNode
object, the fields of Kubernetes' own objects that Headroom reads, and the closed list of reasons.
"""
