"""Compiles Triton kernels for GPUs that need not be there, and says what they take: for the compiled*.py scripts here.

TRITON_INTERPRET must not be set. No call of a tool has a time limit of its own: whoever runs a script gives it one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90, 100)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def compile_kernel(
    function: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    even: Sequence[str],
    arch: int,
    options: Mapping[str, Any],
) -> Any:
    """What `triton.compile` returns. arguments: types by name. even: those that are multiples of 16."""
    return triton.compile(
        ASTSource(
            fn=function,
            signature={**arguments, **dict.fromkeys(constants, "constexpr")},
            constexprs=dict(constants),
            attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in even},
        ),
        target=GPUTarget("cuda", arch, 32),
        options=dict(options),
    )


def resources(compiled: Any, arch: int) -> dict[str, int]:
    """Registers, memory and warps of a compiled kernel."""
    registers, stack, _, local = usage(compiled.asm["cubin"])
    row = {"registers": registers, "stack_bytes": stack, "local_bytes": local}
    row |= {"spill_bytes": spills(compiled.asm["ptx"], arch), "shared_bytes": compiled.metadata.shared}
    return row | {"warps": compiled.metadata.num_warps}


def counts(ptx: str, **patterns: str) -> dict[str, int]:
    """How often each pattern occurs in the assembler text."""
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


def tool(name: str, content: bytes, *options: str) -> str:
    """What one of the tools that come with triton says of a cubin."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def usage(cubin: bytes) -> tuple[int, ...]:
    """Registers, stack, static shared and local bytes."""
    text = tool("cuobjdump", cubin, "--dump-resource-usage")
    found = USAGE.search(text)
    assert found, text
    return tuple(map(int, found.groups()))


def spills(ptx: str, arch: int) -> int:
    """Bytes of spill stores and loads, as the assembler says."""
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        file.write(ptx.encode())
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{'a' * (arch >= 90)}", file.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = SPILLS.findall(done.stderr + done.stdout)
    assert found, done.stderr
    return sum(int(number) for pair in found for number in pair)


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to FILE")
    parser.add_argument("--ptx", type=Path, metavar="FOLDER", help="keep the compiled kernels in FOLDER")
    parser.add_argument("--few", action="store_true", help="not all of them for all of the GPUs")
    return parser


@contextmanager
def fresh_cache() -> Iterator[None]:
    """A cache elsewhere would hide that a kernel no longer compiles."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        yield


def report(rows: list[dict[str, Any]], control: dict[str, Any], file: Path | None) -> None:
    """Prints one JSON object: versions, a row a kernel, and the control, which must look bad. `file` has no control."""
    assemblers = {f"sm_{arch}": get_ptxas(arch).version for arch in ARCHITECTURES}
    versions = {"triton": triton.__version__, "ptxas": assemblers}
    if file is not None:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        file.write_text(f'{{"versions": {json.dumps(versions)},\n "kernels": [\n  {lines}\n ]}}\n')
    print(json.dumps({"versions": versions, "kernels": rows, "control": control}))
