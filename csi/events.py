"""Telling the owner of a Pod what is wrong with its volume, where the driver may do that."""

from __future__ import annotations

from typing import Protocol

from csi.requests import Pod


class Events(Protocol):
    """Takes notes for Pods. Calls return at once and never raise."""

    def warning(self, pod: Pod, reason: str, message: str) -> None:
        """Something is wrong with a volume of `pod`. `reason` is one word in CamelCase."""


class NoEvents:
    """Where nobody is to be told."""

    def warning(self, pod: Pod, reason: str, message: str) -> None:
        """Ignore."""
