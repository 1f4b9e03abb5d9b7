"""How an S3 store is reached. Reads no environment itself: `S3Config.of_url` is handed one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from imgfmt.digest import digest_of
from imgfmt.errors import InvalidInput
from transfer.store.s3.policy import Patience, RetryConfig

MIB = 1024 * 1024
DEFAULT_REGION = "us-east-1"

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


class Addressing(StrEnum):
    """Where a request names the bucket. `auto`: in the path for endpoints that are not AWS's."""

    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


class Checksums(StrEnum):
    """When uploads carry a CRC. `auto`: on AWS whenever it can, elsewhere where the API asks."""

    AUTO = "auto"
    WHEN_REQUIRED = "when_required"
    WHEN_SUPPORTED = "when_supported"


class Transport(StrEnum):
    """How the bytes of packs are received: by our own client, or by aiobotocore's."""

    ZERO_COPY = "zero-copy"
    PORTABLE = "portable"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys that were handed to us, in place of those that botocore would find. Never shown."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    @property
    def scope(self) -> str:
        """Tells these keys from all others, and can't be turned back into them."""
        parts = self.access_key_id, self.secret_access_key, self.session_token or ""
        pieces = [text.encode() for part in parts for text in (str(len(part)), ":", part)]
        return f"keys:{digest_of(b'snapcask credentials 1', *pieces).hex[:32]}"


@dataclass(frozen=True, slots=True)
class S3Config:
    """One store. `prefix` is empty or ends with `/`. None leaves a value to the AWS configuration.

    `connections` is the most requests at a time; fewer are used where more gain nothing or the
    server asks for less. `bytes_per_s` limits what is received and sent. `credential_scope` tells
    apart whose credentials these are, and is no secret. `credentials` are used as they are, and
    nothing is looked up where they are given. `instance_metadata` says whether they may
    come from the machine's metadata service; None: only for AWS itself.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Addressing = Addressing.AUTO
    ca_bundle: str | None = None
    verify_tls: bool = True
    checksums: Checksums = Checksums.AUTO
    sign: bool = True
    instance_metadata: bool | None = None
    transport: Transport = Transport.ZERO_COPY
    connections: int = 64
    range_bytes: int = 8 * MIB
    part_bytes: int = 8 * MIB
    bytes_per_s: int | None = None
    credential_scope: str = "default"
    credentials: Credentials | None = None
    patience: Patience = field(default_factory=Patience)
    retry: RetryConfig = field(default_factory=RetryConfig)

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise InvalidInput(f"{self.bucket!r} can't be the name of a bucket")
        if self.prefix and (not self.prefix.endswith("/") or self.prefix.startswith("/")):
            raise InvalidInput(f"prefix {self.prefix!r} does not end with /, or begins with it")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if self.connections < 1:
            raise InvalidInput(
                f"store {self.url}: connections is at least 1, not {self.connections}"
            )
        if self.part_bytes < 5 * MIB or self.range_bytes < 1 * MIB:
            raise InvalidInput("part_bytes is at least 5 MiB, range_bytes 1 MiB")
        if self.bytes_per_s is not None and self.bytes_per_s < 1:
            raise InvalidInput(f"store {self.url}: the bandwidth limit is at least 1 byte a second")

    @property
    def url(self) -> str:
        """How a user names the store."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def of_url(cls, url: str, environment: Mapping[str, str], **given: Any) -> S3Config:
        """The store that `s3://bucket/prefix` names, with the fields in `given` that are not None.

        The usual AWS variables of `environment` fill in what is not given. Credentials, profile,
        CA bundle and proxies are left to botocore, which reads the same variables as every tool.
        """
        bucket, prefix = _split(url)
        chosen = {name: value for name, value in given.items() if value is not None}
        scope = _credential_scope(environment, chosen)
        found = _from_environment(environment) | chosen
        return cls(bucket, prefix, credential_scope=scope, **found)


def _split(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "s3" or not rest:
        raise InvalidInput(f"store {url}: expected s3://bucket or s3://bucket/prefix")
    bucket, _, path = rest.partition("/")
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts) or not path.isprintable():
        raise InvalidInput(f"store {url!r}: a prefix has no . or .. and only printable characters")
    return bucket, "".join(f"{part}/" for part in parts)


def _check_endpoint(endpoint: str) -> None:
    split = urlsplit(endpoint)
    if split.scheme not in ("http", "https") or not split.hostname:
        raise InvalidInput(f"endpoint {endpoint!r} is not an http:// or https:// URL")
    if split.query or split.fragment or split.username:
        raise InvalidInput(f"endpoint {endpoint!r} has more than scheme, host, port and path")


def _credential_scope(environment: Mapping[str, str], chosen: Mapping[str, Any]) -> str:
    """A name for where credentials come from, in the order in which botocore looks for them."""
    if not chosen.get("sign", True):
        return "anonymous"
    if (credentials := chosen.get("credentials")) is not None:
        return str(credentials.scope)
    profile = chosen.get("profile") or environment.get("AWS_PROFILE")
    if chosen.get("profile"):
        return f"profile:{profile}"
    if key := environment.get("AWS_ACCESS_KEY_ID"):
        return f"key:{key}"
    if role := environment.get("AWS_ROLE_ARN"):
        return f"role:{role}"
    return f"profile:{profile or 'default'}"


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the AWS variables say that botocore does not read, or not as this store needs it."""
    found: dict[str, Any] = {}
    if environment.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() not in _TRUE:
        found["endpoint"] = (
            environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or None
        )
    found["region"] = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or None
    mode = environment.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower()
    if mode in (Checksums.WHEN_REQUIRED, Checksums.WHEN_SUPPORTED):
        found["checksums"] = Checksums(mode)
    disabled = environment.get("AWS_EC2_METADATA_DISABLED", "").lower()
    if disabled in _TRUE + _FALSE:
        found["instance_metadata"] = disabled in _FALSE
    return {name: value for name, value in found.items() if value is not None}
