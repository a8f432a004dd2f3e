"""Attributes that are made when they are read."""

from __future__ import annotations

from typing import Any


class Later:
    """An attribute that is made when it is first read, where what was assigned is a function that
    makes it of its object.

        class Compiled:
            report = Later()

        compiled.report = lambda compiled: assembled(compiled, ...)
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        found = instance.__dict__[self._name]
        if callable(found):
            found = instance.__dict__[self._name] = found(instance)
        return found

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value
