"""Kubernetes quantities as whole bytes, read as Kubernetes reads them."""


def parse_bytes(text: str) -> int:
    raise NotImplementedError
