"""The API server as all clients read it: kubeconfig, credentials, errors and watches."""
