"""What kube-scheduler's calls cost: see ``__main__``."""
