"""What a stage reports beside its counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Report(ABC):
    """A shared object of a stage's workers (``Context.share``) that the profile shows under its name.

    Thread-safe; it is read while workers write, and after ``close()``.
    """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""

    @abstractmethod
    def lines(self) -> list[str]:
        """The same for people: short lines for the printed profile; none if there is nothing to say."""


class ReportSnapshot(Report):
    """A report as it stood when it was asked for."""

    def __init__(self, values: dict[str, Any], lines: list[str]) -> None:
        self._values = values
        self._lines = lines

    def to_dict(self) -> dict[str, Any]:
        return self._values

    def lines(self) -> list[str]:
        return self._lines
