"""The aiobotocore client of a store, and what requests of our own need: URL, TLS, proxy, signature.

aiobotocore is imported when the first request is made, so that others need not have it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

from imgfmt.errors import InvalidInput
from transfer.store.s3.config import DEFAULT_REGION, Addressing, Checksums, S3Config
from transfer.store.s3.errors import Place

API_VERSION = "2006-03-01"
"""Of S3; there is no other one."""


@dataclass(frozen=True, slots=True)
class Base:
    """Where the objects of a bucket are: `path` goes before each key and ends with `/`."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host, and the port unless it is the scheme's own; what the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"

    def target(self, key: str) -> str:
        """The path of an object, percent-encoded as it is signed and sent."""
        return self.path + quote(key, safe="/~")


class S3Client:
    """Made by `OpenedClient`, for one event loop. `sdk` is the aiobotocore client."""

    def __init__(self, config: S3Config, session: Any, sdk: Any, base: Base) -> None:
        self.config = config
        self.sdk = sdk
        self.base = base
        self.place = Place(config.bucket, sdk.meta.endpoint_url, sdk.meta.region_name)
        self._session = session

    def tls(self) -> ssl.SSLContext | None:
        """The context for connections of our own: the same roots as the SDK's. Blocks."""
        if self.base.scheme != "https":
            return None
        if self.config.verify_tls:
            return ssl.create_default_context(cafile=_ca_file(self._session, self.config))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context

    def proxy(self) -> str | None:
        """URL of the proxy for this endpoint, from the environment as the SDK has it."""
        from botocore.utils import get_environ_proxies

        url = f"{self.base.scheme}://{self.base.authority}/"
        found: Mapping[str, str] = get_environ_proxies(url)
        proxy = found.get(self.base.scheme) or found.get("all")
        return proxy if not proxy or "://" in proxy else f"http://{proxy}"

    async def signed(self, key: str, headers: dict[str, str]) -> list[tuple[str, str]]:
        """The headers of a GET of `key`, with those that sign it. Raises NoCredentialsError."""
        base = self.base
        if not self.config.sign:
            return [("Host", base.authority), *headers.items()]
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(
            "GET", f"{base.scheme}://{base.authority}{base.target(key)}", headers=headers
        )
        credentials = await self._credentials()
        signer = S3SigV4Auth(credentials, "s3", self.place.region)
        signer.add_auth(request)
        return [("Host", base.authority), *request.headers.items()]

    async def _credentials(self) -> Any:
        from botocore.exceptions import NoCredentialsError

        found = await self._session.get_credentials()
        if found is None:
            raise NoCredentialsError
        return await found.get_frozen_credentials()

    async def fingerprint(self) -> tuple[str, str] | None:
        """What tells one set of credentials from the next, or None if there are none."""
        found = await self._session.get_credentials()
        if found is None:
            return None
        frozen = await found.get_frozen_credentials()
        return frozen.access_key, frozen.token or ""


class OpenedClient:
    """Context manager: a new session and client, which fetch their credentials anew.

    A class, because asyncio closes the generators of a loop that ends all at once, not in order.
    """

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._made: Any = None

    async def __aenter__(self) -> S3Client:
        from aiobotocore.session import AioSession

        config = self._config
        session = AioSession(profile=config.profile)
        session.register_component("data_loader", await asyncio.to_thread(_loader))
        endpoint = config.endpoint or _configured_endpoint(session)
        if config.verify_tls:
            _ca_file(session, config)
        metadata = config.instance_metadata
        if metadata is False or (metadata is None and endpoint is not None):
            session.get_component("credential_provider").remove("iam-role")
        if (given := config.credentials) is not None:
            session.set_credentials(
                given.access_key_id, given.secret_access_key, given.session_token
            )
        region = config.region or session.get_config_variable("region") or DEFAULT_REGION
        session.set_config_variable("region", region)  # for services that give credentials too
        self._made = session.create_client(
            "s3",
            region_name=region,
            endpoint_url=endpoint,
            verify=_verify(config),
            config=_sdk_config(config, session, endpoint),
        )
        sdk = await self._made.__aenter__()
        try:
            return S3Client(config, session, sdk, await _base(config, sdk))
        except BaseException:
            await self._made.__aexit__(None, None, None)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._made.__aexit__(kind, error, trace)


_SERVICES = ["s3", "signin", "sso", "sso-oidc", "sts"]
"""S3, and what credentials of roles, of web identities and of a sign-on come from."""


@functools.cache
def _loader() -> Any:
    """The SDK's descriptions of services, megabytes of JSON: parsed once for all clients.

    It looks through the folders of all services for one; we know which ones.
    """
    from botocore.loaders import Loader

    class FewServices(Loader):  # type: ignore[misc]
        def list_available_services(self, type_name: str) -> list[str]:
            return _SERVICES

        def determine_latest_version(self, service_name: str, type_name: str) -> str:
            if service_name == "s3":
                return API_VERSION
            return str(super().determine_latest_version(service_name, type_name))

    return FewServices()


def _sdk_config(config: S3Config, session: Any, endpoint: str | None) -> Any:
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED

    custom = endpoint is not None
    style: str = config.addressing
    if config.addressing is Addressing.AUTO and custom:
        style = Addressing.PATH
    checksums: str | None = config.checksums
    if config.checksums is Checksums.AUTO:
        checksums = session.get_scoped_config().get("request_checksum_calculation")
        checksums = checksums or ("when_required" if custom else "when_supported")
    s3: dict[str, Any] = {"addressing_style": str(style)}
    if endpoint is None or endpoint.startswith("https:"):
        s3["payload_signing_enabled"] = False  # TLS guards the body; hashing it would cost a core
    return AioConfig(
        s3=s3,
        signature_version="s3v4" if config.sign else UNSIGNED,
        connect_timeout=config.patience.connect_s,
        read_timeout=3600.0,  # `sending` watches; this would count the time that a body takes
        max_pool_connections=2 * config.connections,
        retries={"total_max_attempts": 1, "mode": "standard"},  # `calls` repeats, and counts
        request_checksum_calculation=str(checksums),
        response_checksum_validation="when_required",
        user_agent_extra="snapcask",
    )


def _configured_endpoint(session: Any) -> str | None:
    """The endpoint in the AWS configuration file, which decides what `auto` means."""
    scoped = session.get_scoped_config()
    services = session.full_config.get("services", {}).get(scoped.get("services"), {})
    found = services.get("s3", {}).get("endpoint_url") or scoped.get("endpoint_url")
    return str(found) if found else None


def _verify(config: S3Config) -> bool | str | None:
    return False if not config.verify_tls else config.ca_bundle


def _ca_file(session: Any, config: S3Config) -> str:
    """The file of roots that the SDK would use. Raises InvalidInput if it can't be read."""
    from botocore.httpsession import get_cert_path

    named = config.ca_bundle or session.get_config_variable("ca_bundle")
    named = named or os.environ.get("REQUESTS_CA_BUNDLE")
    if named and not os.access(named, os.R_OK):
        raise InvalidInput(
            f"store {config.url}: the CA bundle {named} can't be read; correct ?ca-bundle= or"
            " AWS_CA_BUNDLE"
        )
    return str(named or get_cert_path(True))


async def _base(config: S3Config, sdk: Any) -> Base:
    """Where the SDK would send a GET: its rules of endpoints, asked once."""
    split = urlsplit(
        await sdk.generate_presigned_url("get_object", Params={"Bucket": config.bucket, "Key": "x"})
    )
    port = split.port or {"http": 80, "https": 443}[split.scheme]
    return Base(split.scheme, split.hostname or "", port, split.path.removesuffix("x"))
