"""Pure decisions: what a pod asks for, where it could end, whether it fits, which node is best."""
