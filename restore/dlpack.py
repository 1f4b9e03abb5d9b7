"""DLPack capsules (https://dmlc.github.io/dlpack), made with ctypes: memory shared, not copied."""

from __future__ import annotations

import atexit
import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from restore.dtypes import DType

CPU, CUDA, CUDA_HOST = 1, 2, 3
"""`DLDeviceType`."""

VERSION = (1, 0)
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_kept: dict[int, tuple[Any, ...]] = {}  # by address of the structure: it, its arrays, its owner
_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def _let_go(address: int) -> None:
    """The consumer needs the memory no more."""
    _kept.pop(address, None)


def _end_capsule(capsule: int) -> None:
    """A capsule ends; if nobody took what it held, that ends too."""
    for name in (_LEGACY, _VERSIONED):
        if _api.PyCapsule_IsValid(capsule, name):
            _kept.pop(_api.PyCapsule_GetPointer(capsule, name), None)


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_release = _Callback(_let_go)
_drop_capsule = _Callback(_end_capsule)


@atexit.register
def _detach() -> None:
    """Whoever lets go after Python has ended calls a C function that does nothing."""
    harmless = ctypes.cast(_api.Py_IsInitialized, ctypes.c_void_p).value
    for kept in _kept.values():
        kept[0].deleter = harmless
        for item in kept:
            _api.Py_IncRef(ctypes.py_object(item))


def capsule(
    owner: object,
    pointer: int,
    device: tuple[int, int],
    dtype: DType,
    shape: Sequence[int],
    *,
    versioned: bool,
) -> Any:
    """A capsule for memory that lives as long as `owner` does. `device`: its type and number."""
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    strides = (ctypes.c_int64 * max(1, len(shape)))(*_strides(shape))
    managed = _ManagedVersioned() if versioned else _Managed()
    managed.deleter = ctypes.cast(_release, ctypes.c_void_p).value
    if isinstance(managed, _ManagedVersioned):
        managed.major, managed.minor = VERSION
    tensor = managed.tensor
    tensor.data = pointer or None
    tensor.device_type, tensor.device_id = device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits, tensor.lanes = int(dtype.code), dtype.bits, 1
    tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    address = ctypes.addressof(managed)
    _kept[address] = (managed, sizes, strides, owner)
    name = _VERSIONED if versioned else _LEGACY
    return _api.PyCapsule_New(address, name, ctypes.cast(_drop_capsule, ctypes.c_void_p).value)


def _strides(shape: Sequence[int]) -> list[int]:
    """Of rows that lie one after the other, in elements."""
    behind = itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)
    return list(behind)[::-1] if shape else []
