"""What the kubelet knows of devices: its checkpoint, its PodResources service, and both joined."""
