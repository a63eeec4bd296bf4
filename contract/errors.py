"""What others got wrong, said so that they can mend it.

ContractError
├── BadQuantity     a text that is no Kubernetes quantity, or one that no device could hold
├── BadAnnotation   one of our annotations, with its key, its value and a right example
└── BadReport       a GPUNode whose status cannot be read at all
"""


class ContractError(ValueError):
    """Base of everything that the other side of the contract can get wrong."""


class BadQuantity(ContractError):
    """``text`` is not a quantity; ``why`` says what is wrong with it in half a sentence."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"{shortened(text)} is not a quantity: {why}")
        self.text = text
        self.why = why


class BadAnnotation(ContractError):
    """An annotation of ours that cannot be used."""

    def __init__(self, key: str, value: str, why: str, example: str) -> None:
        super().__init__(
            f"annotation {key}: {shortened(value)} {why}; right is, for example, {example!r}"
        )
        self.key = key
        self.value = value
        self.why = why
        self.example = example


class BadReport(ContractError):
    """A GPUNode that cannot be decoded; the node is treated as if it had never reported."""


def shortened(text: str, limit: int = 80) -> str:
    """Quote ``text`` so that a hostile value cannot fill a log line or a terminal."""
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")
