"""What benchmarks of the real kube-scheduler share: a control plane, a fleet in it, and pods."""
