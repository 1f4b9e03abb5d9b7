"""Where the driver listens."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import dataclass

from imgfmt.errors import AccessDenied, Conflict, InvalidInput, NotFound
from transfer.oserrors import printable, translate

SCHEME = "unix://"

_MAX_SOCKET_BYTES = 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the driver listens: the path of a unix socket."""

    path: str

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read `unix:///path/to.sock`. Raises InvalidInput."""
        path = text.removeprefix(SCHEME)
        if path == text or not path.startswith("/") or not path.endswith(".sock"):
            raise InvalidInput(f"endpoint {text[:200]!r} is not of the form unix:///path/to.sock")
        if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
            raise InvalidInput(f"endpoint {text[:200]!r} is longer than a socket's path may be")
        return cls(path)

    def prepare(self) -> None:
        """Make room: a socket of an earlier process goes, anything else stays.

        Raises Conflict if somebody listens there, NotFound or AccessDenied where none can be made.
        """
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise NotFound(f"endpoint {printable(self.path)}: its folder is not there; make it")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise AccessDenied(f"endpoint {printable(self.path)}: its folder can't be written to")
        try:
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise Conflict(f"{printable(self.path)} is there and no socket; remove it")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1.0)
                probe.connect(self.path)
            raise Conflict(f"another process listens at {printable(self.path)}; end it")
        except ConnectionRefusedError:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise translate(error, printable(self.path)) from error
