"""The controller of device taints: taints DRA devices with use beyond their claims."""
