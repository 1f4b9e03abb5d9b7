"""csi-sanity, the conformance suite of the interface, against the real driver and real mounts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from imgfmt.reference import TargetKind
from tests.csi.driver import Driver
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import run
from transfer.references import next_record

pytestmark = pytest.mark.root

VERSION = "v5.5.0"
_TOOLS = Path(__file__).parents[2] / ".tools"
_PACKAGE = f"github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@{VERSION}"


@pytest.fixture(scope="session")
def csi_sanity() -> Path:
    """The program, installed once into a folder that git ignores."""
    tool = _TOOLS / f"csi-sanity-{VERSION}" / "csi-sanity"
    if not tool.exists():
        go = shutil.which("go")
        if go is None:
            pytest.skip("needs go to install csi-sanity")
        made = subprocess.run(
            [go, "install", _PACKAGE],
            env={**os.environ, "GOBIN": str(tool.parent)}, cwd="/",
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
    return tool


@pytest.mark.timeout(900)
def test_csi_sanity_passes_and_skips_only_what_is_not_offered(
    csi_sanity: Path, stopped: Driver
) -> None:
    image = stopped.store.add(snapshot(1, mib=2))
    record = next_record("models/llama", "v3", None, TargetKind.IMAGE, image)
    run(stopped.store.store.change_reference(record, None))
    stopped.start()
    parameters = stopped.root / "parameters.yaml"
    parameters.write_text("image: models/llama:v3\n")
    done = subprocess.run(
        [
            csi_sanity, "-csi.endpoint", f"unix://{stopped.socket}",
            "-csi.mountdir", stopped.kubelet / "target",
            "-csi.stagingdir", stopped.root / "staging",
            "-csi.testvolumeparameters", parameters, "-ginkgo.no-color",
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20000:] + stopped.log()[-5000:]
    counts = re.search(r"Ran (\d+) of \d+ Specs.*\n.*?(\d+) Passed.*?(\d+) Failed.*?(\d+) Skipped",
                       done.stdout)  # fmt: skip
    assert counts is not None, done.stdout[-3000:]
    print(counts[0])
    assert int(counts[1]) >= 45
    assert int(counts[3]) == 0
