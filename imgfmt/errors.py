"""What can go wrong, grouped by what a caller does next.

Every layer raises these and no others of its own; the command maps each kind to an exit code.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """A stable machine-readable name for each class of error. Append only."""

    NOT_FOUND = "not-found"
    CORRUPT = "corrupt"
    INVALID_IMAGE = "invalid-image"
    UNSUPPORTED = "unsupported"
    INVALID_INPUT = "invalid-input"
    CONFLICT = "conflict"
    UNAVAILABLE = "unavailable"
    OUT_OF_RESOURCES = "out-of-resources"
    DENIED = "denied"
    INTERNAL = "internal"
    MISMATCH = "mismatch"


class ImageError(Exception):
    """Root of all errors. The message is one line: what, which object, what to do."""

    kind = ErrorKind.INTERNAL


class NotFound(ImageError):
    """The object is not there. Another store may have it."""

    kind = ErrorKind.NOT_FOUND


class CorruptData(ImageError):
    """Bytes differ from what their digest or checksum promises. Do not retry the same source."""

    kind = ErrorKind.CORRUPT


class InvalidImage(ImageError):
    """An object breaks SPEC.md."""

    kind = ErrorKind.INVALID_IMAGE


class Unsupported(ImageError):
    """An object needs a newer version, or a feature that is not known here."""

    kind = ErrorKind.UNSUPPORTED


class InvalidInput(ImageError):
    """The caller asked for something that makes no sense or can't be stored."""

    kind = ErrorKind.INVALID_INPUT


class DoesNotFit(InvalidInput):
    """An image is not for this machine: a rule of it is not met here."""

    kind = ErrorKind.MISMATCH


class Conflict(ImageError):
    """Somebody else changed the reference first."""

    kind = ErrorKind.CONFLICT


class StoreUnavailable(ImageError):
    """The store does not answer as it should now. A retry may help."""

    kind = ErrorKind.UNAVAILABLE


class OutOfResources(ImageError):
    """No space, memory or file descriptors are left."""

    kind = ErrorKind.OUT_OF_RESOURCES


class AccessDenied(ImageError):
    """The caller may not read or write the object. Says nothing about whether it exists."""

    kind = ErrorKind.DENIED


class Internal(ImageError):
    """A fault of snapcask itself."""
