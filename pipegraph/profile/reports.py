"""What a stage reports beside its counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ReportSnapshot(Report):
    """A report as it stood when it was asked for."""

    values: dict[str, Any]
    texts: list[str]

    def to_dict(self) -> dict[str, Any]:
        return self.values

    def lines(self) -> list[str]:
        return self.texts
