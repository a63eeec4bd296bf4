"""The controller of device taints. It taints DRA devices whose use exceeds their claims."""
