"""What the extender and the agent say to each other, to users and to Kubernetes.

Imports nothing of ours: annotations, quantities, the GPUNode object, the fields of Kubernetes'
own objects that we read, and the closed list of reasons.
"""
