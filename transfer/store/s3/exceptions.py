"""From the exceptions of botocore, aiohttp, sockets and TLS to what they mean for a request."""

from __future__ import annotations

import errno
import functools
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from imgfmt.errors import AccessDenied, ImageError, InvalidInput, OutOfResources, StoreUnavailable
from transfer.oserrors import printable
from transfer.store.s3.answer import ProtocolError
from transfer.store.s3.errors import Place, Refusal, RequestFailed, one_line
from transfer.store.s3.http import ConnectionLost, NoAnswer, NoProxy, Stalled
from transfer.store.s3.policy import Action

NO_CREDENTIALS = (
    "no AWS credentials are found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE,"
    " or read a public bucket with ?sign=no"
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
    from botocore.parsers import ResponseParserError

    if isinstance(error, boto.ClientError):
        if error.operation_name in _OF_CREDENTIALS:
            return _no_new_credentials(error, what)
        return _refusal(error).failure(what, place)
    if isinstance(error, ResponseParserError):
        text = f"{what}: {place.endpoint}, or who has the credentials, does not answer as S3 does"
        return _failed(Action.RETRY, StoreUnavailable, f"{text}; check the endpoint")
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


_OF_CREDENTIALS = (
    "AssumeRole", "AssumeRoleWithWebIdentity", "GetRoleCredentials", "CreateToken",
    "CreateOAuth2Token",
)  # fmt: skip
"""What the SDK asks STS and sign-on services for, on the way to a request."""


def _no_new_credentials(error: Any, what: str) -> RequestFailed:
    """What it means that STS or a sign-on service refuses."""
    refusal = _refusal(error)
    said = f"{error.operation_name} is refused ({refusal.code}): {one_line(refusal.message)}"
    text = f"{what}: the AWS credentials can't be had: {said}"
    if refusal.status >= 500 or refusal.code in ("Throttling", "ThrottlingException"):
        return _failed(Action.RETRY, StoreUnavailable, text, sent=False)
    return _failed(Action.FAIL, AccessDenied, text, sent=False)


def _about_credentials(error: Exception) -> str | None:
    from botocore import exceptions as boto

    if isinstance(error, boto.NoCredentialsError | boto.NoAuthTokenError):
        return NO_CREDENTIALS
    if isinstance(error, boto.ProfileNotFound | boto.ConfigNotFound | boto.ConfigParseError):
        return f"{one_line(str(error))}; check AWS_PROFILE and the AWS configuration"
    if isinstance(error, OSError) and error.filename is not None:  # such as a token's
        named = f"{printable(error.filename)}: {error.strerror}"
        return f"the AWS credentials can't be had: {named}; check the AWS configuration"
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
    endpoint, advice = _peer(causes, place)
    again = Action.FAIL if advice is _CREDENTIALS_ADVICE else Action.RETRY  # the SDK has repeated
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = getattr(cause, "verify_message", "it can't be verified")
            text = (
                f"the TLS certificate of {endpoint} is refused ({why}); name the CA that signed it"
                " with AWS_CA_BUNDLE or ?ca-bundle="
            )
            return _failed(Action.FAIL, StoreUnavailable, f"{what}: {text}", sent=False)
    for cause in causes:
        if isinstance(cause, ssl.SSLError) and getattr(cause, "reason", None):
            text = f"TLS with {endpoint} fails ({cause.reason.lower()}); is it an https:// server?"
            action = Action.FAIL if cause.reason in _NOT_TLS else Action.RETRY
            return _failed(action, StoreUnavailable, f"{what}: {text}")
        if isinstance(cause, socket.gaierror):
            text = f"the host of {endpoint} is not found ({cause.strerror}); {advice}"
            return _failed(again, StoreUnavailable, f"{what}: {text}", sent=False)
        code = cause.errno if isinstance(cause, OSError) else None
        if code in (errno.EMFILE, errno.ENFILE):
            text = "too many open files; raise `ulimit -n` or use fewer connections"
            return _failed(Action.FAIL, OutOfResources, f"{what}: {text}", sent=False)
        if code in _UNREACHABLE:
            text = f"can't connect to {endpoint} ({os.strerror(code or 0)}); {advice}"
            return _failed(again, StoreUnavailable, f"{what}: {text}", sent=False)
    text = _SAYINGS.get(type(error).__name__) or one_line(str(error)) or type(error).__name__
    failed = _failed(again, StoreUnavailable, f"{what}: {text} ({endpoint})")
    failed.timed_out = isinstance(error, NoAnswer | TimeoutError)
    return failed


def _peer(causes: Sequence[BaseException], place: Place) -> tuple[str, str]:
    """Who was to be reached (the server, its proxy or one for credentials), and what to check."""
    for cause in causes:
        if isinstance(cause, NoProxy):
            return cause.proxy, _PROXY_ADVICE
        kept = getattr(cause, "kwargs", None)
        given = kept if isinstance(kept, dict) else {}
        if "proxy_url" in given:
            return f"the proxy {_host(given['proxy_url'])}", _PROXY_ADVICE
        if "endpoint_url" in given and _host(given["endpoint_url"]) != _host(place.endpoint):
            host = _host(given["endpoint_url"])
            if not host.startswith((f"{place.bucket}.", "s3.", "s3-")):  # addresses of the bucket
                return f"{host} (for credentials)", _CREDENTIALS_ADVICE
    return place.endpoint, "check the endpoint"


def _host(url: object) -> str:
    """Host and port of a URL, without a password."""
    return urlsplit(str(url)).netloc.rpartition("@")[2]


_CREDENTIALS_ADVICE = "check the AWS configuration"
_PROXY_ADVICE = "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
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
