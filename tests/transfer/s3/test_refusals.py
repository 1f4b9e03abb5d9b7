"""Bad input and bad luck: one line that says what is wrong, for which object, and what to do."""

from __future__ import annotations

import ssl
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import trustme

from imgfmt.errors import AccessDenied, ImageError, InvalidInput, NotFound, StoreUnavailable
from tests.transfer.s3.servers import BUCKET, READER, STRANGER, Credentials, Server, free_ports
from tests.transfer.s3.support import BODY, PACK, TRANSPORTS, error_of, run, serving, store_at
from transfer.store.s3.config import S3Config, Transport
from transfer.store.s3.errors import NoBucket
from transfer.store.s3.store import S3Store
from transfer.testing.faults import Fault, FaultKind
from transfer.testing.little_s3 import refusal

MISSING = PACK.replace("0", "1")
OPERATIONS = ["get", "read_into", "facts", "list", "put", "create", "delete", "reference"]


async def operate(store: S3Store, operation: str, key: str = PACK) -> object:
    """Do one of OPERATIONS."""
    match operation:
        case "get":
            return await store.get(key)
        case "read_into":
            await store.read_into(key, 0, memoryview(bytearray(10)))
        case "facts":
            return await store.facts(key)
        case "list":
            return await store.list_objects("packs/")
        case "put":
            await store.put(key, [b"x"])
        case "create":
            return await store.create(key, [b"x"])
        case "delete":
            await store.delete(key)
        case _:
            return await store.read_reference("name", "tag")
    return None


def fails(store: S3Store, operation: str, kind: type[ImageError], *words: str) -> None:
    """The operation raises this, in one line that has these words."""
    error = error_of(lambda: operate(store, operation))
    assert isinstance(error, kind), repr(error)
    text = str(error)
    assert "\n" not in text
    assert len(text) < 400
    for word in words:
        assert word in text, text


def lasting(kind: FaultKind = FaultKind.OTHER, **given: Any) -> list[Fault]:
    """A fault of every request."""
    return [
        Fault(kind, times=10**9, method=method, **given)
        for method in ("GET", "HEAD", "PUT", "DELETE", "POST")
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_bucket_that_is_not_there(transport: Transport, operation: str) -> None:
    with serving() as server:
        config = S3Config("other", endpoint=server.endpoint, transport=transport)
        words = ["bucket other does not exist", server.endpoint]
        fails(S3Store(config), operation, NoBucket, *words)


@pytest.mark.s3
@pytest.mark.parametrize("operation", ["get", "read_into", "facts", "list", "reference"])
def test_a_bucket_that_is_not_there_on_a_real_server(seaweedfs: Server, operation: str) -> None:
    store = S3Store(S3Config("other", endpoint=seaweedfs.endpoint))
    fails(store, operation, NotFound, "bucket other does not exist", seaweedfs.endpoint)


@pytest.mark.parametrize("operation", ["get", "read_into", "facts", "list"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_region(transport: Transport, operation: str) -> None:
    answers = [
        refusal("PermanentRedirect", 301, headers={"x-amz-bucket-region": "eu-central-1"}),
        refusal("AuthorizationHeaderMalformed", 400, more="<Region>eu-central-1</Region>"),
    ]
    for answer in answers:
        with serving(*lasting(answer=answer)) as server:
            fails(
                store_at(server.endpoint, transport, region="us-east-1"), operation, InvalidInput,
                "bucket bucket is in region eu-central-1", "set AWS_REGION=eu-central-1",
            )  # fmt: skip


def refused(code: str, status: int = 403) -> list[Fault]:
    """Every request is refused with this code."""
    return lasting(answer=refusal(code, status))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_access_denied_is_never_absence(transport: Transport, operation: str) -> None:
    with serving(*refused("AccessDenied")) as server:
        store = store_at(server.endpoint, transport)
        fails(store, operation, AccessDenied, "access denied", "s3://bucket")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("InvalidAccessKeyId", "does not know this access key"),
        ("SignatureDoesNotMatch", "the secret key is wrong"),
        ("ExpiredToken", "the credentials have expired"),
        ("KMS.DisabledException", "its encryption key can't be used"),
        ("SomethingNew", "access denied (SomethingNew)"),
    ],
)
@pytest.mark.parametrize("operation", ["get", "facts", "list", "put"])
def test_other_refusals_of_the_caller(operation: str, code: str, words: str) -> None:
    with serving(*refused(code)) as server:
        fails(store_at(server.endpoint), operation, AccessDenied, words)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("who", "operation"),
    [
        (STRANGER, "get"),
        (STRANGER, "read_into"),
        (STRANGER, "facts"),
        (STRANGER, "reference"),
        (READER, "put"),
        (READER, "create"),
        (Credentials("admin", "wrong"), "get"),
        (Credentials("admin", "wrong"), "facts"),
        (Credentials("nobody", "x"), "list"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_real_server_denies(
    seaweedfs: Server, transport: Transport, who: Credentials, operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in who.environment().items():
        monkeypatch.setenv(name, value)
    fails(store_at(seaweedfs.endpoint, transport), operation, AccessDenied, "s3://bucket")


@pytest.mark.parametrize("operation", ["get", "facts", "list"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_credentials(
    transport: Transport, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")  # an endpoint of our own has none either
    with serving() as server:
        begun_s = time.monotonic()
        store = store_at(server.endpoint, transport)
        fails(store, operation, AccessDenied, "no AWS credentials", "AWS_PROFILE")
        assert time.monotonic() - begun_s < 30
        unsigned = store_at(server.endpoint, transport, sign=False)
        run(operate(unsigned, operation))
        assert all("authorization" not in seen.request.headers for seen in server.seen)


def test_a_profile_that_is_not_there() -> None:
    with serving() as server:
        fails(store_at(server.endpoint, profile="nobody"), "get", AccessDenied, "nobody")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_endpoint_that_is_not_there(transport: Transport, operation: str) -> None:
    [port] = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    begun_s = time.monotonic()
    words = [f"can't connect to {endpoint} (Connection refused)", "check the endpoint"]
    fails(store_at(endpoint, transport), operation, StoreUnavailable, *words)
    assert time.monotonic() - begun_s < 30


@pytest.mark.parametrize("operation", ["get", "facts", "put"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("ahead_s", "words"), [(3600, "60 minutes behind"), (-7200, "120 minutes ahead of")]
)
def test_a_clock_that_is_wrong(
    transport: Transport, operation: str, ahead_s: int, words: str
) -> None:
    date = formatdate(time.time() + ahead_s, usegmt=True)
    answer = refusal("RequestTimeTooSkewed", 403, headers={"Date": date})
    with serving(*lasting(answer=answer)) as server:
        store = store_at(server.endpoint, transport)
        fails(store, operation, AccessDenied, f"this machine's clock is {words} the server's")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("by", ["option", "variable"])
def test_tls_with_a_private_ca(
    authority: trustme.CA, transport: Transport, by: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(bundle)
    given = {"ca_bundle": str(bundle)} if by == "option" else {}
    if by == "variable":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))

    async def work() -> None:
        store = store_at(server.endpoint, transport, **given)
        assert bytes(await store.get(PACK)) == BODY
        buffer = bytearray(1_000_000)
        for _ in range(3):
            await store.read_into(PACK, 999, memoryview(buffer))
            assert buffer == BODY[999 : 999 + len(buffer)]
        await store.put("trees/x", [BODY])
        assert bytes(await store.get("trees/x")) == BODY

    with serving(tls=server_context(authority)) as server:
        run(work())


@pytest.mark.parametrize("operation", ["get", "facts", "put"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tls_with_an_unknown_ca(
    authority: trustme.CA, transport: Transport, operation: str
) -> None:
    with serving(tls=server_context(authority)) as server:
        store = store_at(server.endpoint, transport)
        fails(store, operation, StoreUnavailable, "certificate", "AWS_CA_BUNDLE", server.endpoint)
        unchecked = store_at(server.endpoint, transport, verify_tls=False)
        run(operate(unchecked, operation))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tls_with_a_server_that_has_none(transport: Transport) -> None:
    with serving() as server:
        endpoint = server.endpoint.replace("http:", "https:")
        fails(store_at(endpoint, transport), "get", StoreUnavailable, "is it an https:// server?")


def test_a_ca_bundle_that_is_not_there() -> None:
    with serving() as server:
        store = store_at(server.endpoint, ca_bundle="/nonexistent/ca.pem")
        fails(store, "get", InvalidInput, "/nonexistent/ca.pem", "AWS_CA_BUNDLE")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_object_that_was_deleted(transport: Transport) -> None:
    with serving() as server:
        store = store_at(server.endpoint, transport)
        for operation in ("get", "read_into"):
            error = error_of(lambda: operate(store, operation, MISSING))  # noqa: B023
            assert type(error) is NotFound
            assert MISSING in str(error)
        assert run(store.facts(MISSING)) is None


def test_a_server_that_is_no_s3() -> None:
    answer = refusal("x", 404)
    answer.body = b"<html>not here</html>"
    answer.headers = {"Content-Type": "text/html"}
    with serving(*lasting(answer=answer)) as server:
        for operation in ("get", "read_into", "reference"):
            store = store_at(server.endpoint)
            fails(store, operation, StoreUnavailable, "not as S3 does", "check the endpoint")
        fails(store_at(server.endpoint), "facts", NotFound, "bucket bucket does not exist")


@pytest.mark.s3
def test_foreign_objects_are_passed_over(seaweedfs: Server) -> None:
    client = seaweedfs.client()
    keys = ["refs/readme.txt", "refs/a/b/c/d", "refs/UPPER/x", "packs/ab/", "packs/notes", "other"]
    for key in keys:
        client.put_object(Bucket=BUCKET, Key=f"foreign/{key}", Body=b"hello")

    async def work() -> None:
        store = S3Store(S3Config(BUCKET, "foreign/", endpoint=seaweedfs.endpoint))
        assert await store.list_references() == []
        assert [facts.key for facts in await store.list_objects("packs/")] == ["packs/notes"]

    run(work())


def test_what_a_server_says_can_do_nothing_to_a_terminal() -> None:
    answer = refusal("x", 400)
    answer.body = b"<Error><Code>Odd\x1b[2J</Code><Message>one\n\x07two</Message></Error>"
    answer.headers = {}
    with serving(*lasting(answer=answer)) as server:
        fails(store_at(server.endpoint), "get", InvalidInput, "(Odd?[2J): one ?two")
