"""Compiles the splitzip kernels for several GPUs, none of which is needed, and says what they take.

`python tests/kernels/compiled.py [--json FILE]` prints one JSON object: versions, and a row a kernel. The settings are
those that the launch code uses. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kvstore.codecs.splitzip.kernels.decode import decode_kernel
from kvstore.codecs.splitzip.kernels.encode import encode_kernel
from kvstore.codecs.splitzip.kernels.launch import WARPS, constants, options

ARCHITECTURES = (80, 90, 100)
SIGNATURES = {
    "encode": (encode_kernel, {"table": "*i64", "work": "*i64", "out": "*u8", "sizes": "*i64"}),
    "decode": (decode_kernel, {"table": "*i64", "payload": "*u8", "damaged": "*i32"}),
}
# (dtype, dim, aligned): without gaps, with, with a dim that does not divide a chunk, and whatever else there may be.
# All are compiled for one architecture, the two that matter most for all, other dtypes in the first layout.
LAYOUTS = {
    "flat": (-1, True),
    "strided": (128, True),
    "uneven": (96, True),
    "unaligned": (-1, False),
    "any": (0, False),
}
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def cases() -> list[tuple[str, str, str, int]]:
    """(kernel, dtype, layout, architecture)."""
    chosen = [("bfloat16", layout, 90) for layout in LAYOUTS]
    chosen += [("bfloat16", layout, arch) for arch in ARCHITECTURES if arch != 90 for layout in ("flat", "strided")]
    chosen += [(dtype, "flat", 90) for dtype in ("float16", "float32", "float8_e5m2")]
    return [(kernel, *case) for case in chosen for kernel in SIGNATURES]


def compile_for(kernel: str, dtype: str, layout: str, arch: int, **changes: Any) -> dict[str, Any]:
    """One row. changes: options of the compiler in place of the launch code's."""
    function, pointers = SIGNATURES[kernel]
    dim, aligned = LAYOUTS[layout]
    values = constants(dtype, dim, aligned) | ({"LOOK": 32 * WARPS} if kernel == "encode" else {})
    signature = {**pointers, **dict.fromkeys(values, "constexpr")}
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    compiled = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=values, attrs=attributes),
        target=GPUTarget("cuda", arch, 32),
        options={**options(dtype, dim, aligned), **changes},
    )
    ptx = compiled.asm["ptx"]
    registers, stack, _, local = usage(compiled.asm["cubin"])
    row = {"kernel": f"splitzip/{kernel}", "dtype": dtype, "layout": layout, "arch": f"sm_{arch}"}
    row |= {"registers": registers, "stack_bytes": stack, "local_bytes": local, "spill_bytes": spills(ptx, arch)}
    row |= {"shared_bytes": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    row["wide_loads"] = len(re.findall(r"ld\.global\.v4\.b32", ptx))
    row["wide_stores"] = len(re.findall(r"st\.global\.v4\.b32", ptx))
    row["polls"] = len(re.findall(r"ld\.volatile\.global\.b64", ptx))
    return row


def usage(cubin: bytes) -> tuple[int, ...]:
    """Registers, stack, static shared and local bytes."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    found = USAGE.search(done.stdout)
    assert found, done.stdout
    return tuple(map(int, found.groups()))


def spills(ptx: str, arch: int) -> int:
    """Bytes of spill stores and loads, as the assembler says."""
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(ptx.encode())
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{'a' * (arch >= 90)}", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = SPILLS.findall(done.stderr + done.stdout)
    assert found, done.stderr
    return sum(int(number) for pair in found for number in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the kernels take, compiled for several GPUs.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to FILE")
    args = parser.parse_args()
    # A cache elsewhere would hide that a kernel no longer compiles.
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        rows = [compile_for(*case) for case in cases()]
        control = compile_for("encode", "bfloat16", "flat", 90, maxnreg=32)
    assemblers = {f"sm_{arch}": get_ptxas(arch).version for arch in ARCHITECTURES}
    result = {"versions": {"triton": triton.__version__, "ptxas": assemblers}, "kernels": rows}
    if args.json is not None:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        versions = json.dumps(result["versions"])
        args.json.write_text(f'{{"versions": {versions},\n "kernels": [\n  {lines}\n ]}}\n')
    print(json.dumps({**result, "control": control}))


if __name__ == "__main__":
    main()
