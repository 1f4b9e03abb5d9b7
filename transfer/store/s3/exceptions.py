"""From the exceptions of botocore, aiohttp, sockets and TLS to what they mean for a request."""

from __future__ import annotations

import errno
import functools
import os
import socket
import ssl
from collections.abc import Iterator

from imgfmt.errors import AccessDenied, ImageError, InvalidInput, OutOfResources, StoreUnavailable
from transfer.store.s3.answer import ProtocolError
from transfer.store.s3.errors import Place, Refusal, RequestFailed, one_line
from transfer.store.s3.http import ConnectionLost, NoAnswer, Stalled
from transfer.store.s3.policy import Action

NO_CREDENTIALS = (
    "no AWS credentials are found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,"
    " or read a public bucket with --no-sign-request"
)


def failure_of(error: Exception, what: str, place: Place) -> RequestFailed:
    """What an exception means for a request about `what`.

    Raises the exception again if it is none of those that clients of networks raise: a bug.
    """
    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, ImageError):
        return RequestFailed(Action.FAIL, error)
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return _refusal(error).failure(what, place)
    about_credentials = _about_credentials(error)
    if about_credentials is not None:
        return _failed(Action.FAIL, AccessDenied, f"{what}: {about_credentials}", sent=False)
    of_network = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError)
    if isinstance(error, boto.BotoCoreError | UnicodeError) and not isinstance(error, of_network):
        return _failed(Action.FAIL, InvalidInput, f"{what}: {one_line(str(error))}", sent=False)
    if not isinstance(error, (*of_network, *_network_errors())):
        raise error
    return socket_failure(error, what, place)


@functools.cache
def _network_errors() -> tuple[type[Exception], ...]:
    """What sockets, TLS and the HTTP clients raise."""
    from aiohttp import ClientError
    from aiohttp.http_exceptions import HttpProcessingError

    own = (ConnectionLost, NoAnswer, ProtocolError, Stalled)
    return (OSError, EOFError, ClientError, HttpProcessingError, *own)


def _refusal(error: Exception) -> Refusal:
    """The server's answer in botocore's ClientError."""
    response = error.response  # type: ignore[attr-defined]
    facts = response.get("ResponseMetadata", {})
    said = response.get("Error", {})
    code = str(said.get("Code", ""))
    return Refusal(
        status=facts.get("HTTPStatusCode", 0),
        headers=facts.get("HTTPHeaders", {}),
        code="" if code.isdecimal() else code,
        message=str(said.get("Message", "")),
        region=str(said.get("Region", "")),
    )


def _about_credentials(error: Exception) -> str | None:
    from botocore import exceptions as boto

    if isinstance(error, boto.NoCredentialsError | boto.NoAuthTokenError):
        return NO_CREDENTIALS
    if isinstance(error, boto.ProfileNotFound | boto.ConfigNotFound | boto.ConfigParseError):
        return f"{one_line(str(error))}; check AWS_PROFILE and the AWS configuration"
    known = (
        boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.TokenRetrievalError,
        boto.SSOError, boto.MetadataRetrievalError, boto.UnknownCredentialError,
    )  # fmt: skip
    if isinstance(error, known):
        return f"the AWS credentials can't be had: {one_line(str(error))}"
    return None


def socket_failure(error: Exception, what: str, place: Place) -> RequestFailed:
    """What an error of the network below means."""
    causes = list(_causes(error))
    endpoint = place.endpoint
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", "it can't be verified")
            text = (
                f"the TLS certificate of {endpoint} is refused ({why}); name the CA that signed it"
                " with --ca-bundle or AWS_CA_BUNDLE"
            )
            return _failed(Action.FAIL, StoreUnavailable, f"{what}: {text}", sent=False)
    for cause in causes:
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", None):
            text = f"TLS with {endpoint} fails ({cause.reason.lower()}); is it an https:// server?"
            action = Action.FAIL if cause.reason in _NOT_TLS else Action.RETRY
            return _failed(action, StoreUnavailable, f"{what}: {text}")
        if isinstance(cause, socket.gaierror):
            text = f"the host of {endpoint} is not found ({cause.strerror}); check the endpoint"
            return _failed(Action.RETRY, StoreUnavailable, f"{what}: {text}", sent=False)
        code = cause.errno if isinstance(cause, OSError) else None
        if code in (errno.EMFILE, errno.ENFILE):
            text = "too many open files; raise `ulimit -n` or use fewer connections"
            return _failed(Action.FAIL, OutOfResources, f"{what}: {text}", sent=False)
        if code in _UNREACHABLE:
            text = f"can't connect to {endpoint} ({os.strerror(code or 0)}); check the endpoint"
            return _failed(Action.RETRY, StoreUnavailable, f"{what}: {text}", sent=False)
    text = _SAYINGS.get(type(error).__name__) or one_line(str(error)) or type(error).__name__
    failed = _failed(Action.RETRY, StoreUnavailable, f"{what}: {text} ({endpoint})")
    failed.timed_out = isinstance(error, NoAnswer | TimeoutError)
    return failed


_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
_UNREACHABLE = (
    errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EHOSTDOWN
)  # fmt: skip
_SAYINGS = {
    "ConnectionResetError": "the connection was reset",
    "BrokenPipeError": "the connection was closed while sending",
    "IncompleteReadError": "the connection was closed too early",
    "ServerDisconnectedError": "the connection was closed too early",
    "ConnectionClosedError": "the connection was closed too early",
    "ClientPayloadError": "the connection was closed too early",
    "TimeoutError": "the server did not answer in time",
    "ReadTimeoutError": "the server did not answer in time",
    "AioReadTimeoutError": "the server did not answer in time",
    "ConnectTimeoutError": "the server did not accept the connection in time",
}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from, inner ones of groups too."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        inner = getattr(cause, "certificate_error", None) or getattr(cause, "os_error", None)
        kept = getattr(cause, "kwargs", None)
        wrapped = kept.get("error") if isinstance(kept, dict) else None
        grouped = list(cause.exceptions) if isinstance(cause, BaseExceptionGroup) else []
        below = (*grouped, inner, wrapped, cause.__cause__, cause.__context__)
        pending += [more for more in below if isinstance(more, BaseException)]


def _failed(
    action: Action, kind: type[ImageError], text: str, *, sent: bool = True
) -> RequestFailed:
    return RequestFailed(action, kind(text), sent=sent)
