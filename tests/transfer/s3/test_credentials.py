"""Credentials that the SDK gets from another service: roles, web identities, sign-on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.transfer.s3.servers import BUCKET, Server, free_ports

ROLE = "arn:aws:iam::123456789012:role/reader"


@pytest.fixture
def configured(tmp_path: Path, moto: Server) -> dict[str, str]:
    """An environment whose only credentials are in profiles of a configuration file."""
    token = tmp_path / "token"
    token.write_text("a-token")
    [nobody] = free_ports(1)
    config = tmp_path / "config"
    config.write_text(
        f"""
[profile base]
aws_access_key_id = admin
aws_secret_access_key = admin-secret
[profile role]
role_arn = {ROLE}
source_profile = base
[profile web]
role_arn = {ROLE}
web_identity_token_file = {token}
[profile lost]
role_arn = {ROLE}
web_identity_token_file = {tmp_path}/lost
[profile sso]
sso_start_url = http://127.0.0.1:{nobody}
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = reader
"""
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return kept | {
        "AWS_CONFIG_FILE": str(config),
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": moto.endpoint,
        "SNAPCASK_STORE": f"s3://{BUCKET}/{tmp_path.name}",
    }


def snapcask(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snapcask", *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("profile", ["role", "web"])
def test_a_role_gives_credentials(configured: dict[str, str], profile: str) -> None:
    environment = configured | {"AWS_PROFILE": profile}
    done = snapcask(environment, "init", configured["SNAPCASK_STORE"], "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert snapcask(environment, "ls").returncode == 0


@pytest.mark.parametrize(
    ("profile", "code", "said"),
    [
        ("role", 5, "(for credentials) (Connection refused); check the AWS configuration"),
        ("lost", 7, "lost: No such file or directory; check the AWS configuration"),
        ("sso", 7, "the AWS credentials can't be had"),
    ],
)
def test_credentials_that_cannot_be_had_are_told_in_one_line(
    configured: dict[str, str], profile: str, code: int, said: str
) -> None:
    [nobody] = free_ports(1)
    away = {"AWS_PROFILE": profile, "AWS_ENDPOINT_URL_STS": f"http://127.0.0.1:{nobody}"}
    failed = snapcask(configured | away, "ls")
    assert (failed.returncode, failed.stdout) == (code, "")
    assert said in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_a_service_that_answers_something_else_is_told_of(
    configured: dict[str, str], seaweedfs: Server
) -> None:
    """SeaweedFS answers what is meant for STS as if it were for a bucket: with no body."""
    elsewhere = {"AWS_PROFILE": "web", "AWS_ENDPOINT_URL_STS": seaweedfs.endpoint}
    failed = snapcask(configured | elsewhere, "ls")
    assert failed.returncode == 5
    assert "does not answer as S3 does; check the endpoint" in failed.stderr


def test_a_proxy_that_is_not_there_is_told_of_as_such(
    configured: dict[str, str], moto: Server
) -> None:
    [nobody] = free_ports(1)
    for transport in ("zero-copy", "portable"):
        store = f"{configured['SNAPCASK_STORE']}?transport={transport}"
        proxied = configured | {
            "AWS_PROFILE": "base",
            "HTTP_PROXY": f"http://user:secret@127.0.0.1:{nobody}",
            "NO_PROXY": "",
        }
        failed = snapcask(proxied, "ls", "--store", store)
        assert failed.returncode == 5
        assert f"can't connect to the proxy 127.0.0.1:{nobody}" in failed.stderr
        assert "secret" not in failed.stderr
