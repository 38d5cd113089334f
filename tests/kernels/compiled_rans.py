"""Compiles the rANS kernels for several GPUs, none of which is needed, and says what they take, as compiled.py does.

`python tests/kernels/compiled_rans.py [--json FILE] [--ptx FOLDER]`. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import triton
from compiled import ARCHITECTURES, spills, usage
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

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


def compile_for(kernel: str, bits: int, arch: int, ptx_folder: Path | None = None, **changes: Any) -> dict[str, Any]:
    """One row. changes: options of the compiler beside the launch code's."""
    function, arguments = SIGNATURES[kernel]
    pointers = [name for name, kind in arguments.items() if kind.startswith("*")]
    compiled = triton.compile(
        ASTSource(
            fn=function,
            signature={**arguments, "BITS": "constexpr"},
            constexprs={"BITS": bits},
            attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers},
        ),
        target=GPUTarget("cuda", arch, 32),
        options={**OPTIONS, **changes},
    )
    ptx = compiled.asm["ptx"]
    if ptx_folder is not None:
        (ptx_folder / f"{kernel}-{bits}-sm_{arch}.ptx").write_text(ptx)
        (ptx_folder / f"{kernel}-{bits}-sm_{arch}.cubin").write_bytes(compiled.asm["cubin"])
    registers, stack, _, local = usage(compiled.asm["cubin"])
    row = {"kernel": f"rans/{kernel}", "bits": bits, "arch": f"sm_{arch}"}
    row |= {"registers": registers, "stack_bytes": stack, "local_bytes": local, "spill_bytes": spills(ptx, arch)}
    row |= {"shared_bytes": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    row["barriers"] = len(re.findall(r"\bbar\.sync", ptx))
    row["warp_sums"] = len(re.findall(r"\bredux\.sync\.add", ptx))
    row["bit_counts"] = len(re.findall(r"\bpopc\.b32", ptx))
    row["divisions"] = len(re.findall(r"\b(?:div|rem)\.[us]", ptx))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="What the rANS kernels take, compiled for several GPUs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to FILE")
    parser.add_argument("--ptx", type=Path, metavar="FOLDER", help="keep the compiled kernels in FOLDER")
    args = parser.parse_args()
    # A cache elsewhere would hide that a kernel no longer compiles.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        cases = [(kernel, bits, arch) for kernel in SIGNATURES for bits in (11, 12) for arch in ARCHITECTURES]
        rows = [compile_for(*case, args.ptx) for case in cases]
        control = compile_for("encode", 12, 90, maxnreg=24)
    assemblers = {f"sm_{arch}": get_ptxas(arch).version for arch in ARCHITECTURES}
    versions = {"triton": triton.__version__, "ptxas": assemblers}
    if args.json is not None:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        args.json.write_text(f'{{"versions": {json.dumps(versions)},\n "kernels": [\n  {lines}\n ]}}\n')
    print(json.dumps({"versions": versions, "kernels": rows, "control": control}))


if __name__ == "__main__":
    main()
