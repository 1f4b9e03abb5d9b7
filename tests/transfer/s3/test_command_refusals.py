"""What the command says, and exits with, where a bucket is not as it should be."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest
import trustme

from snapcask import interrupts
from snapcask.__main__ import main
from tests.snapcask.support import Outcome, contents, make_snapshot
from tests.transfer.s3.servers import free_ports
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Fault, FaultKind
from transfer.testing.little_s3 import Answer, LittleS3, Request, refusal

Call = Callable[..., Outcome]

METHODS = ("GET", "HEAD", "PUT", "DELETE", "POST")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command in this process, whose signal handlers it leaves alone."""
    monkeypatch.setattr(interrupts, "install", lambda: None)

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A directory to push."""
    return make_snapshot(tmp_path / "snapshot")


@pytest.fixture
def objects(call: Call, snapshot: Path) -> LittleS3:
    """A bucket that has the directory as `snap:v1`."""
    with FaultServer() as server:
        assert call("init", url_of(server.endpoint)).code == 0
        assert call("push", snapshot, "snap:v1", "--store", url_of(server.endpoint)).code == 0
        return server.objects


def url_of(endpoint: str, bucket: str = "bucket") -> str:
    return f"s3://{bucket}/store?endpoint={endpoint}"


def one_line(failed: Outcome, code: int, *parts: str) -> None:
    """The command failed with this code and one line that has all `parts`."""
    assert failed.code == code, failed
    assert failed.out == ""
    assert failed.err.startswith("snapcask: error: ")
    assert failed.err.count("\n") == 1
    for part in parts:
        assert part in failed.err, failed.err


def refusing(answer: Answer) -> list[Fault]:
    """Every request gets this answer."""
    return [Fault(FaultKind.OTHER, times=10**9, method=m, answer=answer) for m in METHODS]


SKEWED = {"Date": formatdate(time.time() + 3600, usegmt=True)}
REFUSALS = {
    "wrong region": (
        refusal("PermanentRedirect", 301, headers={"x-amz-bucket-region": "eu-central-1"}),
        2, ["bucket bucket is in region eu-central-1", "AWS_REGION=eu-central-1"],
    ),
    "denied": (refusal("AccessDenied", 403), 7, ["access denied", "s3://bucket/store"]),
    "expired": (refusal("ExpiredToken", 403), 7, ["credentials have expired", "get new ones"]),
    "unknown key": (refusal("InvalidAccessKeyId", 403), 7, ["does not know this access key"]),
    "clock": (
        refusal("RequestTimeTooSkewed", 403, headers=SKEWED), 7, ["minutes behind the server"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["ls", "push", "pull", "init"])
@pytest.mark.parametrize(("answer", "code", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_told_and_is_never_absence(
    call: Call, snapshot: Path, tmp_path: Path, verb: str, answer: Answer, code: int,
    words: list[str],
) -> None:  # fmt: skip
    with FaultServer(script=refusing(answer)) as server:
        url = url_of(server.endpoint)
        line: dict[str, list[str | Path]] = {
            "ls": ["ls", "--store", url],
            "push": ["push", snapshot, "snap:v1", "--store", url],
            "pull": ["pull", "snap:v1", tmp_path / "out", "--store", url],
            "init": ["init", url],
        }
        one_line(call(*line[verb]), code, *words)
    assert not (tmp_path / "out").exists()


def test_no_bucket_no_credentials_and_no_server_are_told_apart(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultServer() as server:
        absent = call("ls", "--store", url_of(server.endpoint, "other"))
        one_line(absent, 4, "bucket other does not exist", server.endpoint)
        one_line(call("ls", "--store", url_of(server.endpoint)), 4, "snapcask init")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        one_line(call("ls", "--store", url_of(server.endpoint)), 7, "no AWS credentials")
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        one_line(call("ls", "--store", url_of(server.endpoint)), 7, "nobody", "AWS_PROFILE")
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    [port] = free_ports(1)
    gone = call("ls", "--store", url_of(f"http://127.0.0.1:{port}"))
    one_line(gone, 5, "can't connect", str(port), "check the endpoint")


def test_a_certificate_that_nobody_vouches_for_is_told(call: Call) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with FaultServer(tls=context) as server:
        refused = call("ls", "--store", url_of(server.endpoint))
        one_line(refused, 5, "certificate", "AWS_CA_BUNDLE", server.endpoint)
    with FaultServer() as server:
        plain = call("ls", "--store", url_of(server.endpoint.replace("http:", "https:")))
        one_line(plain, 5, "is it an https:// server?")


def test_foreign_objects_in_the_bucket_are_passed_over(
    call: Call, objects: LittleS3, snapshot: Path, tmp_path: Path
) -> None:
    for key in ("packs/notes", "refs/readme.txt", "refs/a/b/c", "index/x", "leases/y", "trees/z"):
        objects.put(f"store/{key}", b"hello")
    with FaultServer(objects) as server:
        url = url_of(server.endpoint)
        assert call("ls", "--store", url, "--json").document["references"][0]["tag"] == "v1"
        assert call("pull", "snap:v1", tmp_path / "out", "--store", url).code == 0
        assert call("push", snapshot, "snap:v2", "--store", url).code == 0
        assert call("verify", "--all", "--store", url).code == 0
    assert contents(tmp_path / "out") == contents(snapshot)


def test_a_pack_that_was_deleted_is_told(call: Call, objects: LittleS3, tmp_path: Path) -> None:
    [key] = [key for key in objects.objects if "/packs/" in key]
    del objects.objects[key]
    with FaultServer(objects) as server:
        url = url_of(server.endpoint)
        failed = call("pull", "snap:v1", tmp_path / "out", "--store", url)
        one_line(
            failed,
            4,
            f"in pack {key[-32:]}",
            "s3://bucket/store: its pack does not exist; `snapcask verify` tells",
        )
        assert call("verify", "snap:v1", "--store", url).code == 6
    assert not (tmp_path / "out").exists()


class Overwritten(LittleS3):
    """A bucket in which the pack `key` is overwritten as soon as some of it was sent."""

    def __init__(self, objects: LittleS3, key: str) -> None:
        super().__init__(objects.bucket)
        self.objects = objects.objects
        self._key = key

    def answer(self, request: Request) -> Answer:
        """See `LittleS3.answer`."""
        found = super().answer(request)
        if request.method == "GET" and request.path.endswith(self._key):
            self.put(self._key, self.objects[self._key].body[::-1])
        return found


def test_a_pack_that_is_overwritten_during_a_pull_is_told(
    call: Call, objects: LittleS3, tmp_path: Path
) -> None:
    [key] = [key for key in objects.objects if "/packs/" in key]
    cut = Fault(FaultKind.SHORT_BODY, key=key, after_bytes=100_000)
    with FaultServer(Overwritten(objects, key), [cut]) as server:
        url = url_of(server.endpoint)
        failed = call("pull", "snap:v1", tmp_path / "out", "--store", url)
        statuses = [seen.status for seen in server.seen if seen.request.path.endswith(key)]
    assert 412 in statuses  # no byte of two versions was joined
    one_line(failed, 6, f"in pack {key[-32:]}", "s3://bucket/store")
    assert not (tmp_path / "out").exists()


def test_verify_all_tells_of_a_damaged_reference(call: Call, objects: LittleS3) -> None:
    objects.put("store/refs/x/y", b"junk")
    with FaultServer(objects) as server:
        failed = call("verify", "--all", "--store", url_of(server.endpoint))
    assert failed.code == 6
    assert "damaged reference" in failed.out
    assert "refs/x/y" in failed.out
