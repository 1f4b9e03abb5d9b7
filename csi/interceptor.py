"""The one place where errors become gRPC codes, and calls become log lines and figures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from csi.errors import NOT_FINAL, code_of
from csi.logs import without_secrets
from csi.metrics import Metrics
from imgfmt.errors import ImageError
from transfer.oserrors import printable, translate
from transfer.tasks import first_cause

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    Context = ServicerContext[Any, Any]

MAX_MESSAGE_CHARS = 1000

_log = logging.getLogger(__name__)
_POD = "csi.storage.k8s.io/pod."


class Calls(grpc.aio.ServerInterceptor):
    """Wraps every call."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        inner: Any = handler.unary_unary

        async def call(message: Message, context: Context) -> Message:
            return await self._call(method, inner, message, context)

        return grpc.unary_unary_rpc_method_handler(
            call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _call(self, method: str, inner: Any, message: Message, context: Context) -> Message:
        begun_s = time.monotonic()
        code, text, error = grpc.StatusCode.OK, "", None
        try:
            answer: Message = await inner(message, context)
        except asyncio.CancelledError:
            self._note(method, message, grpc.StatusCode.CANCELLED, "the caller left", begun_s)
            raise
        except BaseException as caught:
            error = first_cause(caught)
            code, text = _told(error)
        self._note(method, message, code, text, begun_s, error)
        if error is not None:
            await context.abort(code, text)
        return answer

    def _note(
        self,
        method: str,
        message: Message,
        code: grpc.StatusCode,
        text: str,
        begun_s: float,
        error: BaseException | None = None,
    ) -> None:
        seconds = time.monotonic() - begun_s
        self._metrics.called(method, code.name, seconds)
        told = {"method": method, "code": code.name, "seconds": round(seconds, 4), **_of(message)}
        if code is grpc.StatusCode.OK:
            quiet = method in ("Probe", "NodeGetVolumeStats", "NodeGetCapabilities")
            _log.log(logging.DEBUG if quiet else logging.INFO, "done", extra=told)
        elif code is grpc.StatusCode.INTERNAL:
            _log.error(text, extra=told, exc_info=error)
        else:
            level = logging.INFO if code in NOT_FINAL else logging.WARNING
            _log.log(level, text, extra=told)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("request %s", without_secrets(message), extra={"method": method})


def _told(error: BaseException) -> tuple[grpc.StatusCode, str]:
    if isinstance(error, ImageError):
        return code_of(error), _line(str(error))
    if isinstance(error, OSError):
        translated = translate(error, printable(error.filename or "this node"))
        return code_of(translated), _line(str(translated))
    if isinstance(error, Exception):
        text = f"fault of the driver: {type(error).__name__}; its log tells more, please report it"
        return grpc.StatusCode.INTERNAL, text
    raise error


def _line(text: str) -> str:
    """One line that a log, an event and a person can take."""
    shown = text if text.isprintable() else printable(text)
    return shown[:MAX_MESSAGE_CHARS]


def _of(message: Message) -> dict[str, str]:
    """What tells calls apart: the volume, its target and the Pod."""
    found: dict[str, str] = {}
    for key, field in (("volume", "volume_id"), ("target", "target_path"), ("named", "name")):
        if value := getattr(message, field, ""):
            found[key] = str(value)[:300]
    context = getattr(message, "volume_context", None) or {}
    for key in ("namespace", "name", "uid"):
        if value := context.get(_POD + key):
            found["pod" if key == "name" else f"pod_{key}"] = str(value)[:300]
    return found
