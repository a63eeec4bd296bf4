"""The controller of device taints. It taints DRA devices with use beyond their claims."""
