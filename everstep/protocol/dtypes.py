"""Lists the element size in bytes of each torch dtype, by name without `torch.`, for processes without torch.

A byte that packs several values counts as one element, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES_BY_BYTES = {
    1: (
        "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
        "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7 "
        "qint8 quint8 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8"
    ),
    2: "float16 bfloat16 int16 uint16 bits16",
    4: "float32 int32 uint32 complex32 qint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
ITEM_BYTES: Mapping[str, int] = {
    name: item_bytes for item_bytes, names in _NAMES_BY_BYTES.items() for name in names.split()
}
