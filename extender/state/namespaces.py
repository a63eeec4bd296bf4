"""The namespaces and the default VRAM request of pods in each."""

from contract.annotations import DEFAULT_VRAM
from contract.kube import Namespace


class Namespaces:
    """Written by the thread that owns the cluster state; lookups by name work from any thread."""

    def __init__(self) -> None:
        self._held: dict[str, Namespace] = {}
        self._default_vram: dict[str, str] = {}

    def see(self, namespace: Namespace) -> bool:
        """Record the namespace; return whether the default request of its pods changed."""
        name = namespace.metadata.name
        self._held[name] = namespace
        return self._put(name, (namespace.metadata.annotations or {}).get(DEFAULT_VRAM))

    def lose(self, name: str) -> bool:
        """Remove the namespace; return whether the default request of its pods changed."""
        self._held.pop(name, None)
        return self._put(name, None)

    def _put(self, name: str, text: str | None) -> bool:
        if self._default_vram.get(name) == text:
            return False
        if text is None:
            del self._default_vram[name]
        else:
            self._default_vram[name] = text
        return True

    def known(self) -> set[str]:
        return set(self._held)

    def get(self, name: str) -> Namespace | None:
        return self._held.get(name)

    def default_vram(self, name: str) -> str | None:
        return self._default_vram.get(name)

    def default_vrams(self) -> dict[str, str]:
        """Return namespace -> default VRAM request, of the namespaces that have one."""
        return dict(self._default_vram)
