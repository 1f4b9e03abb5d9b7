"""What can go wrong in the driver beside the errors of imgfmt, and the gRPC code of each error.

A code is final or not for kubelet (docs/csi.md): after a final one it takes it that nothing is
there, so whoever raises has cleaned up before.
"""

from __future__ import annotations

import grpc

from imgfmt.errors import ErrorKind, ImageError


class AlreadyExists(ImageError):
    """The same name is there with other arguments."""

    kind = ErrorKind.CONFLICT


class Unmet(ImageError):
    """The node, the image or the target is not as the call needs it."""

    kind = ErrorKind.INVALID_INPUT


class OutOfRange(ImageError):
    """What was asked for can't be as small or as large as that."""

    kind = ErrorKind.INVALID_INPUT


class Unauthenticated(ImageError):
    """The credentials that were handed over are no credentials."""

    kind = ErrorKind.DENIED


class InProgress(ImageError):
    """It goes on in the background, or another call is at it. The same call is to come again."""

    kind = ErrorKind.UNAVAILABLE


_OF_CLASS = {
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    InProgress: grpc.StatusCode.ABORTED,
    OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    Unmet: grpc.StatusCode.FAILED_PRECONDITION,
}
_OF_KIND = {
    ErrorKind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorKind.CORRUPT: grpc.StatusCode.DATA_LOSS,
    ErrorKind.INVALID_IMAGE: grpc.StatusCode.DATA_LOSS,
    ErrorKind.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.INVALID_INPUT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.CONFLICT: grpc.StatusCode.ABORTED,
    ErrorKind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorKind.OUT_OF_RESOURCES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorKind.DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorKind.INTERNAL: grpc.StatusCode.INTERNAL,
}

NOT_FINAL = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
"""After these kubelet still unpublishes when the Pod goes away; after all others it does not."""


def code_of(error: ImageError) -> grpc.StatusCode:
    """The code that a call fails with."""
    return _OF_CLASS.get(type(error)) or _OF_KIND.get(error.kind, grpc.StatusCode.INTERNAL)
