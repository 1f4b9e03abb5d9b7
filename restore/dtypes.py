"""Element types of tensors: their names in safetensors files, sizes, and codes of DLPack."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class DLCode(IntEnum):
    """`DLDataTypeCode` of DLPack 1.2."""

    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    COMPLEX = 5
    BOOL = 6
    FLOAT8_E4M3FN = 10
    FLOAT8_E4M3FNUZ = 11
    FLOAT8_E5M2 = 12
    FLOAT8_E5M2FNUZ = 13
    FLOAT8_E8M0FNU = 14
    FLOAT6_E2M3FN = 15
    FLOAT6_E3M2FN = 16
    FLOAT4_E2M1FN = 17


@dataclass(frozen=True, slots=True)
class DType:
    """`name` is that of safetensors; an element takes `bits`, of which 4 and 6 share bytes."""

    name: str
    bits: int
    code: DLCode


_ALL = (
    DType("BOOL", 8, DLCode.BOOL),
    DType("F4", 4, DLCode.FLOAT4_E2M1FN),
    DType("F6_E2M3", 6, DLCode.FLOAT6_E2M3FN),
    DType("F6_E3M2", 6, DLCode.FLOAT6_E3M2FN),
    DType("U8", 8, DLCode.UINT),
    DType("I8", 8, DLCode.INT),
    DType("F8_E5M2", 8, DLCode.FLOAT8_E5M2),
    DType("F8_E4M3", 8, DLCode.FLOAT8_E4M3FN),
    DType("F8_E5M2FNUZ", 8, DLCode.FLOAT8_E5M2FNUZ),
    DType("F8_E4M3FNUZ", 8, DLCode.FLOAT8_E4M3FNUZ),
    DType("F8_E8M0", 8, DLCode.FLOAT8_E8M0FNU),
    DType("I16", 16, DLCode.INT),
    DType("U16", 16, DLCode.UINT),
    DType("F16", 16, DLCode.FLOAT),
    DType("BF16", 16, DLCode.BFLOAT),
    DType("I32", 32, DLCode.INT),
    DType("U32", 32, DLCode.UINT),
    DType("F32", 32, DLCode.FLOAT),
    DType("C64", 64, DLCode.COMPLEX),
    DType("F64", 64, DLCode.FLOAT),
    DType("I64", 64, DLCode.INT),
    DType("U64", 64, DLCode.UINT),
)

DTYPES = {dtype.name: dtype for dtype in _ALL}
U8 = DTYPES["U8"]
