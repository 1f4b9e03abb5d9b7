"""cuFile through `cuda.bindings.cufile`. For `restore.direct_storage`, which decides on its use.

The driver is opened once for a process, without the mode in which it copies through host memory.
Releases from 13.1 on raise ValueError, not their own error, where cuFile gives an error's number
that they do not know, such as one of the system.
"""

from __future__ import annotations

from functools import lru_cache

from imgfmt.errors import Unsupported

try:
    from cuda.bindings import cufile
except ImportError:
    cufile = None


class CuFile:
    """See `restore.direct_storage.FileApi`. Made by `cuda_files`."""

    def __init__(self) -> None:
        if cufile is None:
            raise Unsupported("GPUDirect needs cuda-python: install snapcask[gpu]")
        try:
            compat_mode = cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE
            cufile.set_parameter_bool(compat_mode, False)
            cufile.driver_open()
        except (cufile.cuFileError, RuntimeError, AttributeError, ValueError) as error:
            # RuntimeError: there is no library; AttributeError: a release that names things anew
            raise Unsupported(f"cuFile does not start: {error}") from error

    def open(self, descriptor: int) -> int:
        """See `FileApi.open`."""
        described = cufile.Descr()
        described.type = cufile.FileHandleType.OPAQUE_FD
        described.handle.fd = descriptor
        described.fs_ops = 0
        try:
            return int(cufile.handle_register(described.ptr))
        except (cufile.cuFileError, ValueError) as error:
            raise Unsupported(f"cuFile does not take the file: {error}") from error

    def close(self, handle: int) -> None:
        """See `FileApi.close`."""
        try:
            cufile.handle_deregister(handle)
        except (cufile.cuFileError, ValueError) as error:
            raise Unsupported(f"cuFile does not let go of a file: {error}") from error

    def read(self, handle: int, pointer: int, n_bytes: int, offset: int) -> int:
        """See `FileApi.read`. Releases before 13.1 and 12.9.5 return nothing: an error here."""
        try:
            got = cufile.read(handle, pointer, n_bytes, offset, 0)
        except (cufile.cuFileError, ValueError) as error:
            raise Unsupported(f"cuFile does not read: {error}") from error
        if not isinstance(got, int):
            raise Unsupported("this release of cuda-python does not tell what cuFile read")
        return got


@lru_cache(maxsize=1)
def cuda_files() -> CuFile:
    """cuFile in this process. Raises Unsupported."""
    return CuFile()
