"""Compiles the splitzip kernels for several GPUs, none of which is needed, and says what they take.

`python tests/kernels/compiled.py [--few] [--json FILE]`. The settings are those that the launch code uses.
"""

from __future__ import annotations

from typing import Any

from compiling import ARCHITECTURES, arguments, compile_kernel, counts, fresh_cache, report, resources

from kvstore.codecs.splitzip.kernels.decode import decode_kernel
from kvstore.codecs.splitzip.kernels.encode import encode_kernel
from kvstore.codecs.splitzip.kernels.launch import WARPS, constants, options

SIGNATURES = {
    "encode": (encode_kernel, {"table": "*i64", "work": "*i64", "out": "*u8", "sizes": "*i64"}),
    "decode": (decode_kernel, {"table": "*i64", "payload": "*u8", "damaged": "*i32"}),
}
# (dtype, dim, aligned): without gaps, with, with a dim that does not divide a chunk, and whatever else there may be.
# All are compiled for one architecture, the two that matter most for all, other dtypes in the first layout; few are of
# bfloat16 in the two that matter most, and for the other architectures in the first.
LAYOUTS = {
    "flat": (-1, True),
    "strided": (128, True),
    "uneven": (96, True),
    "unaligned": (-1, False),
    "any": (0, False),
}


INSTRUCTIONS = {
    "wide_loads": r"ld\.global\.v4\.b32",
    "wide_stores": r"st\.global\.v4\.b32",
    "polls": r"ld\.volatile\.global\.b64",
}


def cases(few: bool) -> list[tuple[str, str, str, int]]:
    """(kernel, dtype, layout, architecture)."""
    chosen = [("bfloat16", layout, 90) for layout in list(LAYOUTS)[: 2 if few else None]]
    for arch in ARCHITECTURES[-1:] if few else (arch for arch in ARCHITECTURES if arch != 90):
        chosen += [("bfloat16", layout, arch) for layout in ("flat", "strided")[: 1 if few else 2]]
    chosen += [(dtype, "flat", 90) for dtype in ("float16", "float32", "float8_e5m2") if not few]
    return [(kernel, *case) for case in chosen for kernel in SIGNATURES]


def compile_for(kernel: str, dtype: str, layout: str, arch: int, **changes: Any) -> dict[str, Any]:
    """One row. changes: options of the compiler in place of the launch code's."""
    function, pointers = SIGNATURES[kernel]
    dim, aligned = LAYOUTS[layout]
    values = constants(dtype, dim, aligned) | ({"LOOK": 32 * WARPS} if kernel == "encode" else {})
    compiled = compile_kernel(function, pointers, values, list(pointers), arch, options(dtype, dim, aligned) | changes)
    row = {"kernel": f"splitzip/{kernel}", "dtype": dtype, "layout": layout, "arch": f"sm_{arch}"}
    return {**row, **resources(compiled, arch), **counts(compiled.asm["ptx"], **INSTRUCTIONS)}


def main() -> None:
    args = arguments("What the splitzip kernels take, compiled for several GPUs.").parse_args()
    with fresh_cache():
        rows = [compile_for(*case) for case in cases(args.few)]
        control = compile_for("encode", "bfloat16", "flat", 90, maxnreg=32)
    report(rows, control, args.json)


if __name__ == "__main__":
    main()
