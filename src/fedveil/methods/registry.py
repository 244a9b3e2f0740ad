"""Classes by name. The module of one of ours is imported when its class is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")


class LazyRegistry(MutableMapping[str, type[T]], Generic[T]):
    """Classes by name; to list the names loads nothing."""

    def __init__(self) -> None:
        self._found: dict[str, type[T] | None] = {}
        self._modules: dict[str, str] = {}

    def offer(self, modules: Mapping[str, str]) -> None:
        """Names with the modules that register them when they are imported."""
        self._modules.update(modules)
        self._found.update({name: self._found.get(name) for name in modules})

    def other(self, name: str, module: str) -> type[T] | None:
        """The class of this name, unless this module is the one to register it."""
        if self._modules.get(name) == module:
            return self._found.get(name)
        return self.get(name)

    def __getitem__(self, name: str) -> type[T]:
        found = self._found[name]
        if found is None:
            import_module(self._modules[name])
            found = self._found[name]
            assert found is not None, f"{self._modules[name]} does not register {name}"
        return found

    def __setitem__(self, name: str, value: type[T]) -> None:
        self._found[name] = value

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found
