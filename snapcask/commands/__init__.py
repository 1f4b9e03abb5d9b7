"""The verbs of the command, one module each, which is loaded when its verb is used.

A module defines `command`. The one-line texts stand here, so that `--help` loads none of them.
"""

from __future__ import annotations

import importlib

import click

from snapcask import __version__

VERBS = {
    "init": "Create a store.",
    "push": "Store a directory, or several, as an image.",
    "pull": "Write an image to a directory.",
    "check": "Say whether an image is for this machine, rule by rule.",
    "load": "Load tensors to a GPU, and say how fast.",
    "inspect": "Show what an image or a directory holds.",
    "ls": "List the references of a store.",
    "tag": "Point a reference at an image.",
    "rm": "Delete a reference.",
    "gc": "Delete what nothing refers to.",
    "diff": "Show how two images differ, and what they share.",
    "verify": "Read images back and check every chunk.",
    "variants": "Make a list of images to choose from by machine.",
    "doctor": "Check a store and this machine, and say what limits a transfer.",
    "bench": "Show what dedup would find in directories.",
    "cp": "Copy an image to another store.",
    "index": "Maintain the index of chunks.",
    "store": "Show how a store is set up and what it holds.",
    "prefetch": "Have an image in the cache of this node.",
    "mount": "Mount an image of the cache, read-only.",
    "umount": "Undo a mount.",
    "cache": "Look after the cache of this node.",
    "csi": "Serve images to Kubernetes as volumes.",
}


class Verbs(click.Group):
    """A group whose commands are modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, the most used first."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the module of a verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes, JSON documents and environment variables: docs/cli.md.",
)
@click.version_option(__version__, prog_name="snapcask", message="%(prog)s %(version)s")
def verbs() -> None:
    """Content-addressed images of process snapshots.

    STORE is a directory, a file:// URL or s3://bucket/prefix, given by --store or SNAPCASK_STORE.
    REF names an image: NAME:TAG, NAME@blake3:<hex>, or blake3: and at least 8 digits.
    """
