"""Errors in values that users or agents wrote, with messages that help their author fix them.

ContractError
├── BadQuantity     text that is no Kubernetes quantity, or a quantity above int64
├── BadAnnotation   one of our annotations, with its key, its value and a valid example
└── BadReport       a GPUNode that cannot be decoded
"""


class ContractError(ValueError):
    """Base of all errors of this module."""


class BadQuantity(ContractError):
    """``text`` is not a quantity; ``why`` gives the reason in half a sentence."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"{shortened(text)} is not a quantity: {why}")
        self.text = text
        self.why = why


class BadAnnotation(ContractError):
    """An annotation of ours that cannot be used."""

    def __init__(self, key: str, value: str, why: str, example: str) -> None:
        super().__init__(
            f"annotation {key}: {shortened(value)} {why}. Example: {key}: {_as_yaml(example)}"
        )
        self.key = key
        self.value = value
        self.why = why
        self.example = example


class BadReport(ContractError):
    """A GPUNode that cannot be decoded; the node is treated as if it had no report."""


def shortened(text: str, limit: int = 80) -> str:
    """Quote ``text`` and cut it, so that a hostile value cannot fill a log line or a terminal."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _as_yaml(value: str) -> str:
    """Quote an example that YAML would read as a number or a boolean: annotations are strings."""
    return f'"{value}"' if value.isdigit() or value in ("true", "false") else value
