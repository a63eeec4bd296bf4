"""Creates and renews certificates for clusters without cert-manager."""
