"""Which bucket a user means, and how it is reached."""

from __future__ import annotations

from typing import Any

import pytest

from imgfmt.errors import InvalidInput
from transfer.store.s3.config import Addressing, Checksums, S3Config, Transport
from transfer.store.s3.options import split_options
from transfer.store.s3.store import S3Store
from transfer.store.url import open_store


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "named"),
    [
        ("s3://bucket", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "bucket", "", "s3://bucket"),
        ("S3://my.bucket-1/a", "my.bucket-1", "a/", "s3://my.bucket-1/a"),
        ("s3://bucket/a//b c/", "bucket", "a/b c/", "s3://bucket/a/b c"),
    ],
)
def test_a_url_names_bucket_and_prefix(url: str, bucket: str, prefix: str, named: str) -> None:
    config = S3Config.of_url(url, {})
    assert (config.bucket, config.prefix, config.url) == (bucket, prefix, named)
    store = open_store(url, environment={})
    assert isinstance(store, S3Store)
    assert store.url == named
    store.close()


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///key", "s3://a b", "s3://bucket/../x", "s3://bucket/a/./b", "s3://b\n/x"]
)
def test_what_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        S3Config.of_url(url, {})


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint": "localhost:9000"},
        {"endpoint": "ftp://host"},
        {"endpoint": "http://user:secret@host"},
        {"endpoint": "http://host/?x=1"},
        {"connections": 0},
        {"part_bytes": 1},
        {"bytes_per_s": 0},
        {"prefix": "no-slash"},
        {"prefix": "/x/"},
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        S3Config("bucket", **given)


@pytest.mark.parametrize(
    ("environment", "field", "value"),
    [
        ({"AWS_ENDPOINT_URL": "http://a"}, "endpoint", "http://a"),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, "endpoint", "http://b"),
        (
            {"AWS_ENDPOINT_URL": "http://a", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            "endpoint", None,
        ),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-west-2"}, "region", "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "us-west-2"}, "region", "us-west-2"),
        (
            {"AWS_REQUEST_CHECKSUM_CALCULATION": "WHEN_SUPPORTED"},
            "checksums", Checksums.WHEN_SUPPORTED,
        ),
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "instance_metadata", False),
        ({"AWS_EC2_METADATA_DISABLED": "false"}, "instance_metadata", True),
        ({}, "instance_metadata", None),
        ({}, "addressing", Addressing.AUTO),
    ],
)  # fmt: skip
def test_the_aws_variables_fill_in(environment: dict[str, str], field: str, value: object) -> None:
    assert getattr(S3Config.of_url("s3://bucket", environment), field) == value


def test_what_is_given_goes_before_the_environment() -> None:
    config = S3Config.of_url(
        "s3://bucket", {"AWS_REGION": "eu-west-1", "AWS_ENDPOINT_URL": "http://a"},
        region="us-west-2", endpoint=None, transport=Transport.PORTABLE,
    )  # fmt: skip
    assert (config.region, config.endpoint) == ("us-west-2", "http://a")
    assert config.transport is Transport.PORTABLE


@pytest.mark.parametrize(
    ("environment", "given", "scope"),
    [
        ({}, {}, "profile:default"),
        ({"AWS_PROFILE": "team"}, {}, "profile:team"),
        ({"AWS_PROFILE": "team", "AWS_ACCESS_KEY_ID": "AK"}, {}, "key:AK"),
        ({"AWS_ACCESS_KEY_ID": "AK"}, {"profile": "other"}, "profile:other"),
        ({"AWS_ROLE_ARN": "arn:role/x"}, {}, "role:arn:role/x"),
        ({"AWS_ACCESS_KEY_ID": "AK"}, {"sign": False}, "anonymous"),
    ],
)
def test_credentials_of_different_people_have_different_scopes(
    environment: dict[str, str], given: dict[str, object], scope: str
) -> None:
    assert S3Config.of_url("s3://bucket", environment, **given).credential_scope == scope


def test_options_in_a_url_become_fields_and_unknown_ones_are_refused() -> None:
    url = "s3://bucket/p?endpoint=http://h:1&connections=3&transport=portable&sign=no&bwlimit=7"
    address, fields = split_options(url)
    config = S3Config.of_url(address, {}, **fields)
    assert (config.bucket, config.prefix, config.endpoint) == ("bucket", "p/", "http://h:1")
    assert (config.connections, config.bytes_per_s, config.sign) == (3, 7, False)
    assert config.transport is Transport.PORTABLE
    for wrong in ("colour=blue", "connections=many", "sign=maybe", "transport=fast"):
        with pytest.raises(InvalidInput, match=wrong.partition("=")[0]):
            split_options(f"s3://bucket?{wrong}")
