"""The debug API and its page: read-only views, one module per resource."""
