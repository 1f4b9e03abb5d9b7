"""What tests of the command and the API share: small snapshots, and the command in a process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call of the command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output."""
        return json.loads(self.out)


def make_snapshot(root: Path, seed: int = 1) -> Path:
    """A directory with a file of data, zeros and repetition, small and empty files and links.

    `pages.img` is the same for two seeds but for its last 256 KiB.
    """
    root.mkdir(parents=True)
    same, own = random.Random(0), random.Random(seed)
    zeros = bytes(40 * PAGE)
    pages = same.randbytes(2 << 20) + zeros + same.randbytes(5000) + bytes(3000)
    (root / "pages.img").write_bytes(pages + own.randbytes(256 << 10) + b"end")
    (root / "small.img").write_bytes(own.randbytes(100))
    (root / "empty").touch()
    (root / "sub").mkdir()
    (root / "sub" / "more").write_bytes(b"more")
    (root / "link").symlink_to("sub/more")
    os.link(root / "small.img", root / "sub" / "small-again")
    return root


def contents(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """All below `root` that a pull must bring back, by relative path."""
    found: dict[bytes, tuple[Any, ...]] = {}
    top = os.fsencode(root)
    for folder, names, files in os.walk(top):
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if os.path.islink(path):
                what: bytes = os.readlink(path)
            elif os.path.isfile(path):
                with open(path, "rb") as file:
                    what = file.read()
            else:
                what = b""
            found[path[len(top) + 1 :]] = (what, status.st_mode, status.st_mtime_ns)
    return found


def command(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    prelude: str = "",
    **options: Any,
) -> Outcome:
    """Run the command in a process of its own; `prelude` is Python that it runs first."""
    done = subprocess.run(
        command_line(*arguments, prelude=prelude),
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def command_line(*arguments: str | Path, prelude: str = "") -> Sequence[str]:
    """The arguments of a process that runs the command."""
    code = f"{prelude}\nimport sys\nfrom snapcask.__main__ import main\nsys.exit(main())"
    start = ["-c", code] if prelude else ["-m", "snapcask"]
    return [sys.executable, *start, *(os.fspath(argument) for argument in arguments)]
