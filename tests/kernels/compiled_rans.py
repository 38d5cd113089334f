"""Compiles the rANS kernels for several GPUs, none of which is needed, and says what they take.

`python tests/kernels/compiled_rans.py [--few] [--json FILE] [--ptx FOLDER]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiling import ARCHITECTURES, arguments, compile_kernel, counts, fresh_cache, report, resources

from kvstore.codecs.rans.kernels.decode import decode_kernel
from kvstore.codecs.rans.kernels.encode import encode_kernel
from kvstore.codecs.rans.kernels.launch import OPTIONS

SIGNATURES = {
    "encode": (
        encode_kernel,
        {"symbols": "*u8", "classes": "*u8", "places": "*i64", "parts": "i32", "entries": "*i32", "tables": "i32"}
        | {"out": "*u8", "out_bytes": "i64", "rooms": "*i64", "streams": "*i64", "after": "*i64", "status": "*i32"},
    ),
    "decode": (
        decode_kernel,
        {"payload": "*u8", "payload_bytes": "i64", "streams": "*i64", "places": "*i64", "parts": "i32", "slots": "*i32"}
        | {"tables": "i32", "classes": "*u8", "symbols": "*u8", "state": "*i32", "status": "*i32"},
    ),
}


INSTRUCTIONS = {
    "barriers": r"\bbar\.sync",
    "warp_sums": r"\bredux\.sync\.add",
    "bit_counts": r"\bpopc\.b32",
    "divisions": r"\b(?:div|rem)\.[us]",
}


def compile_for(kernel: str, bits: int, arch: int, ptx_folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    """One row. changes: options of the compiler beside the launch code's."""
    function, types = SIGNATURES[kernel]
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    compiled = compile_kernel(function, types, {"BITS": bits}, pointers, arch, OPTIONS | changes)
    ptx = compiled.asm["ptx"]
    if ptx_folder is not None:
        (ptx_folder / f"{kernel}-{bits}-sm_{arch}.ptx").write_text(ptx)
        (ptx_folder / f"{kernel}-{bits}-sm_{arch}.cubin").write_bytes(compiled.asm["cubin"])
    row = {"kernel": f"rans/{kernel}", "bits": bits, "arch": f"sm_{arch}", **resources(compiled, arch)}
    return row | counts(ptx, **INSTRUCTIONS)


def main() -> None:
    args = arguments("What the rANS kernels take, compiled for several GPUs.").parse_args()
    with fresh_cache():
        widths, architectures = ((12,), ARCHITECTURES[-2:]) if args.few else ((11, 12), ARCHITECTURES)
        cases = [(kernel, bits, arch) for kernel in SIGNATURES for bits in widths for arch in architectures]
        rows = [compile_for(*case, args.ptx) for case in cases]
        control = compile_for("encode", 12, 90, maxnreg=24)
    report(rows, control, args.json)


if __name__ == "__main__":
    main()
