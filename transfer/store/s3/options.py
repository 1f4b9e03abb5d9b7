"""Options of a bucket in its URL: `s3://bucket/prefix?endpoint=http://host:9000&connections=32`.

They travel wherever the URL goes: a flag, a variable, a driver's configuration; and two stores in
one command can differ in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

from imgfmt.errors import InvalidInput
from transfer.store.s3.config import Addressing, Checksums, Transport


def _flag(text: str) -> bool:
    return {"yes": True, "no": False}[text.lower()]


OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "endpoint": ("endpoint", str, "URL of a server that is not AWS's"),
    "region": ("region", str, "a region"),
    "profile": ("profile", str, "a profile of the AWS configuration"),
    "addressing": ("addressing", Addressing, "auto, path or virtual"),
    "ca-bundle": ("ca_bundle", str, "a file of certificates to trust"),
    "verify-tls": ("verify_tls", _flag, "yes or no"),
    "checksums": ("checksums", Checksums, "auto, when_required or when_supported"),
    "sign": ("sign", _flag, "yes or no"),
    "transport": ("transport", Transport, "zero-copy or portable"),
    "connections": ("connections", int, "a number"),
    "bwlimit": ("bytes_per_s", int, "bytes a second"),
}
"""Name in a URL: field of `S3Config`, how it is read, and what it may be."""


def split_options(url: str) -> tuple[str, dict[str, Any]]:
    """The URL without its options, and fields of `S3Config`. Raises InvalidInput for others."""
    address, question, query = url.partition("?")
    fields: dict[str, Any] = {}
    for name, text in parse_qsl(query, keep_blank_values=True) if question else ():
        if name not in OPTIONS:
            known = ", ".join(OPTIONS)
            raise InvalidInput(f"store {url}: {name!r} is not an option; there are {known}")
        field, read, allowed = OPTIONS[name]
        try:
            fields[field] = read(text)
        except (ValueError, KeyError):
            raise InvalidInput(f"store {url}: {name} is {allowed}, not {text!r}") from None
    return address, fields
