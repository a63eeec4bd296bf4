"""Errors in values that users or agents wrote. The messages help the author to fix the value.

ContractError
├── BadQuantity     text that is not a Kubernetes quantity, or a quantity above int64
├── BadAnnotation   an annotation of Headroom, with its key, its value and a valid example
└── BadReport       a GPUNode that cannot be decoded
"""


class ContractError(ValueError):
    """Base of all errors of this module."""


class BadQuantity(ContractError):
    """``text`` is not a quantity. ``why`` is a clause that gives the reason."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"{shortened(text)} is not a quantity: {why}")
        self.text = text
        self.why = why


class BadAnnotation(ContractError):
    """An annotation of Headroom has a value that cannot be used."""

    def __init__(self, key: str, value: str, why: str, example: str) -> None:
        super().__init__(
            f"annotation {key}: {shortened(value)} {why}. Example: {key}: {_as_yaml(example)}"
        )
        self.key = key
        self.value = value
        self.why = why
        self.example = example


class BadReport(ContractError):
    """A GPUNode cannot be decoded. Its node is treated as if it had no report."""


def shortened(text: str, limit: int = 80) -> str:
    """Quote and truncate ``text``, so that a hostile value cannot fill a log line or a terminal."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _as_yaml(value: str) -> str:
    """Quote an example that YAML would read as a number or a boolean, because annotations are
    strings."""
    return f'"{value}"' if value.isdigit() or value in ("true", "false") else value
