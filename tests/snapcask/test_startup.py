"""What the command loads: next to nothing for `--version` and `--help`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import snapcask
from snapcask.commands import VERBS
from tests.snapcask.conftest import Call

HEAVY = {"asyncio", "blake3", "logging", "msgpack", "numpy", "rich", "yaml", "zstandard"}


def loaded_by(code: str) -> set[str]:
    """The modules that a process has loaded after running `code`."""
    code += "\nimport sys; print('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import snapcask",
        "from snapcask.__main__ import main; assert main(['--version']) == 0",
        "from snapcask.__main__ import main; assert main(['--help']) == 0",
        "from snapcask.__main__ import main; assert main([]) == 0",
        "from snapcask.__main__ import main; assert main(['push', '--help']) == 0",
    ],
)
def test_heavy_modules_are_not_loaded_before_they_are_needed(code: str) -> None:
    assert not loaded_by(code) & HEAVY


def test_the_version_is_printed_without_loading_click() -> None:
    code = "from snapcask.__main__ import main; assert main(['--version']) == 0"
    assert "click" not in loaded_by(code)


def test_rich_is_not_loaded_where_nobody_looks() -> None:
    code = (
        "import os, tempfile; from snapcask.__main__ import main\n"
        "with tempfile.TemporaryDirectory() as d:\n"
        "    os.mkdir(d + '/a')\n"
        "    assert main(['init', d + '/store']) == 0\n"
        "    assert main(['push', d + '/a', 'a:1', '--store', d + '/store', '-q']) == 0"
    )
    assert "rich" not in loaded_by(code)


def verb_loads(*arguments: str) -> set[str]:
    """The modules that a verb has loaded, run after a push of a directory with one file."""
    return loaded_by(
        "import os, tempfile; from snapcask.__main__ import main\n"
        "with tempfile.TemporaryDirectory() as d:\n"
        "    os.mkdir(d + '/a')\n"
        "    open(d + '/a/file', 'wb').write(b'x')\n"
        "    os.environ['SNAPCASK_STORE'] = d + '/store'\n"
        "    assert main(['init', d + '/store', '-q']) == 0\n"
        "    assert main(['push', d + '/a', 'a:1', '-q']) == 0\n"
        f"    assert main([word.replace('DIR', d) for word in {list(arguments)}]) == 0"
    )


@pytest.mark.parametrize(
    "arguments",
    [["push", "DIR/a", "a:2", "-q"], ["ls"], ["gc", "--dry-run"], ["verify", "--all", "-q"]],
)
def test_what_only_moves_chunks_loads_nothing_of_devices_and_machines(
    arguments: list[str],
) -> None:
    roots = {name.partition(".")[0] for name in verb_loads(*arguments)}
    assert not roots & {"restore", "cuda", "csi"}


def test_a_pull_loads_nothing_that_loads_tensors() -> None:
    loaded = verb_loads("pull", "a:1", "DIR/out", "-q")
    assert "restore.host_facts" in loaded
    assert not loaded & {"restore.load", "restore.devices", "restore.compat", "snapcask.loading"}


def test_the_version_is_that_of_the_package(call: Call) -> None:
    assert call("--version").out == f"snapcask {snapcask.__version__}\n"


def test_the_help_names_every_verb(call: Call) -> None:
    shown = call("--help")
    assert shown.code == 0
    assert call("-h").out == call().out == shown.out
    for verb, text in VERBS.items():
        assert f"  {verb}" in shown.out
        assert text in shown.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(call: Call, verb: str) -> None:
    shown = call(verb, "--help")
    assert shown.code == 0
    assert shown.out.startswith(f"Usage: snapcask {verb}")


def test_every_public_name_can_be_had() -> None:
    for name in snapcask.__all__:
        assert getattr(snapcask, name) is not None
    assert set(snapcask.__all__) <= set(dir(snapcask))
    assert None not in [getattr(snapcask.aio, name) for name in snapcask.aio.__all__]
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = snapcask.nothing_of_that_name
