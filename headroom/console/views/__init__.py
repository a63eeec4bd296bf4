"""The views of the debug API, one module for each resource."""
