"""Compiles the kernels of the predictive and the donor codec for GPUs that need not be there, and says what they take.

`python tests/kernels/compiled_predict.py [--few] [--json FILE] [--ptx FOLDER]`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from compiling import ARCHITECTURES, arguments, compile_kernel, fresh_cache, report, resources, tool

from kvstore.codecs.donor.groups.kernels.decode import join_differences_kernel
from kvstore.codecs.donor.groups.kernels.device import COLUMNS, CORRECTED
from kvstore.codecs.donor.groups.kernels.donors import choose_shifts_kernel, donate_kernel, measure_rows_kernel
from kvstore.codecs.donor.groups.kernels.encode import (
    correct_kernel,
    foretell_kernel,
    measure_columns_kernel,
    split_differences_kernel,
)
from kvstore.codecs.predictive.kernels.copy import copy_kernel
from kvstore.codecs.predictive.kernels.decode import finish_kernel, measure_kernel, read_kernel
from kvstore.codecs.predictive.kernels.dense import dense_kernel
from kvstore.codecs.predictive.kernels.device import BLOCK_K, BLOCK_M, BLOCK_N, DENSE_OPTIONS, OPTIONS, TILE
from kvstore.codecs.predictive.kernels.encode import pack_kernel, split_kernel
from kvstore.codecs.predictive.levels.kernels.decode import join_kernel
from kvstore.codecs.predictive.levels.kernels.device import GROUP_K, GROUP_OPTIONS
from kvstore.codecs.predictive.levels.kernels.encode import pack_groups_kernel, split_groups_kernel
from kvstore.codecs.predictive.levels.kernels.groups import sums_kernel
from kvstore.codecs.predictive.lossy_kernels import launch as lossy_launch
from kvstore.codecs.predictive.lossy_kernels import symbols as lossy_symbols
from kvstore.codecs.predictive.lossy_kernels import values as lossy_values
from kvstore.codecs.predictive.lossy_kernels.device import BLOCK_N as LOSSY_BLOCK_N

KERNELS = {
    "dense": dense_kernel,
    "measure": measure_kernel,
    "read": read_kernel,
    "finish": finish_kernel,
    "split": split_kernel,
    "pack": pack_kernel,
    "copy": copy_kernel,
    "sums": sums_kernel,
    "join": join_kernel,
    "split_groups": split_groups_kernel,
    "pack_groups": pack_groups_kernel,
    "donor/donate": donate_kernel,
    "donor/measure_rows": measure_rows_kernel,
    "donor/choose_shifts": choose_shifts_kernel,
    "donor/foretell": foretell_kernel,
    "donor/measure_columns": measure_columns_kernel,
    "donor/correct": correct_kernel,
    "donor/split": split_differences_kernel,
    "donor/join": join_differences_kernel,
    "lossy/count": lossy_symbols.count_kernel,
    "lossy/classify": lossy_symbols.classify_kernel,
    "lossy/count_escapes": lossy_symbols.count_escapes_kernel,
    "lossy/take": lossy_symbols.take_kernel,
    "lossy/sums": lossy_values.sums_kernel,
    "lossy/values": lossy_values.values_kernel,
    "lossy/finish": lossy_values.finish_kernel,
}
# Where a name has another type.
OTHERS: dict[str, dict[str, str]] = {
    **{f"donor/{kernel}": {"sums": "*fp32"} for kernel in ("measure_rows", "choose_shifts")},
    **{f"lossy/{kernel}": {"shifts": "*u8", "values": "*fp32"} for kernel in ("count", "classify", "take")},
    "lossy/count_escapes": {"escapes": "*i64"},
    "lossy/values": {"bias": "*fp32", "tile": "*fp32", "x": "*fp32"},
    "lossy/finish": {"x": "*fp32", "target": "*bf16"},
}
OTHERS["donor/measure_rows"]["unit"] = "fp32"
OTHERS["lossy/take"] |= {"escapes": "*i16", "tile": "*fp32", "step": "fp32"}
# The first is the product of all layers.
LARGEST = ("dense", "donor/join", "lossy/finish")
# Others have OPTIONS.
OF_KERNELS = {
    "dense": DENSE_OPTIONS,
    "sums": DENSE_OPTIONS,
    "join": GROUP_OPTIONS,
    "split_groups": GROUP_OPTIONS,
    "pack_groups": GROUP_OPTIONS,
    "donor/foretell": GROUP_OPTIONS,
    "donor/split": GROUP_OPTIONS,
    "donor/join": GROUP_OPTIONS,
    "lossy/sums": DENSE_OPTIONS,
}
_TYPES = {
    "*i8": "inputs weight residuals shift corrections basis",
    "*i16": "scale mu values p gain narrow factor donors angles scales kept",
    "*i32": "states expect adapt order turns shifts applied bias cos sin offsets adapts fits raw_bits escapes bad sums"
    " block_of words sums_without found sizes slots state status",
    "*i64": "begins listed counts means slopes tokens sections firsts places targets pieces streams",
    "*u8": "classes symbols payload source target stream",
    "*fp32": "out_scale from_fixed to_fixed in_scale totals component unit out",
}
POINTERS = {name: kind for kind, names in _TYPES.items() for name in names.split()}
# What the launch code passes that is no multiple of 16, or may be none.
ODD = {
    "blocks",
    "shift0",
    "shift1",
    "shift2",
    "until0",
    "until1",
    "vocabulary",
    "part",
    "parts",
    "rows",
    "first_class",
    "before",
    "tables",
    "stream_bytes",
    "scale_stride",
    "columns",
    "groups",
    "first_group",
    "unit",
    "first",
    "available",
    "step",
    "exact",
    "wanted",
    "head_stride",
    "token_stride",
}
FUSED = re.compile(r"\bfma\.|\bdiv\.(?:full|approx)|\b(?:mul|add|sub)\.f32")  # or may be, or are not exact
PRODUCT = re.compile(r"(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*\.(?:s8\.s8|kind::i8)")


def cases(few: bool) -> list[tuple[str, dict[str, Any], int]]:
    """(kernel, constants, architecture): heads of 128 and 64, K that is rotated and whatever is not.

    few: the largest kernels for one architecture, and for the newest the product that matters most."""
    product = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
    chosen = of_layers(product) + of_levels(product) + of_donors() + of_loss()
    if few:
        kernels = [kernel for kernel, _ in chosen]
        chosen = [chosen[kernels.index(kernel)] for kernel in LARGEST]
    if few:
        return [*((*case, 90) for case in chosen), (*chosen[0], ARCHITECTURES[-1])]
    return [(*case, arch) for arch in ARCHITECTURES for case in chosen]


def of_layers(product: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(kernel, constants) of the mode that foretells whole layers."""
    chosen: list[tuple[str, dict[str, Any]]] = []
    for dim, width in ((128, BLOCK_N), (64, 32), (32, 16)):
        chosen += [("dense", {"FIRST": False, "ROTATE": True, "DIM": dim, **product, "BLOCK_N": width})]
    chosen += [("dense", {"FIRST": True, "ROTATE": True, "DIM": 128, **product})]
    chosen += [("dense", {"FIRST": first, "ROTATE": False, "DIM": 0, **product}) for first in (False, True)]
    for dim in (128, 80):
        for rotate in (True, False):
            chosen += [(kernel, {"DIM": dim, "ROTATE": rotate, "TILE": TILE}) for kernel in ("finish", "split")]
        chosen += [("pack", {"DIM": dim, "TILE": TILE})]
    return chosen + [(kernel, {"TILE": TILE}) for kernel in ("measure", "read", "copy")]


def of_levels(product: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(kernel, constants) of the levels."""
    chosen: list[tuple[str, dict[str, Any]]] = []
    group = {"BLOCK_M": BLOCK_M, "BLOCK_K": GROUP_K}
    for dim, rotate, first in ((128, True, False), (128, False, False), (80, True, True), (80, False, True)):
        of_part = {"GROUPED": not first, "DIM": dim, "ROTATE": rotate, **group}
        chosen += [("join", {**of_part, "TILE": TILE, "BITS": 12}), ("split_groups", of_part)]
        chosen += [("pack_groups", {"DIM": dim, "ROTATE": rotate, "TILE": TILE})]
        chosen += [("sums", {"FIRST": first, **product})] * rotate
    return chosen


def of_donors() -> list[tuple[str, dict[str, Any]]]:
    """(kernel, constants) of the donor codec's mode in groups."""
    chosen: list[tuple[str, dict[str, Any]]] = []
    group = {"BLOCK_M": BLOCK_M, "BLOCK_K": GROUP_K}
    for dim, rotate, first in ((128, True, False), (128, False, False), (80, True, True), (80, False, True)):
        of_part = {"GROUPED": not first, "DIM": dim, "ROTATE": rotate, **group}
        chosen += [("donor/foretell", of_part), ("donor/join", {**of_part, "TILE": TILE, "BITS": 12})]
        chosen += [("donor/split", {"DIM": dim, "ROTATE": rotate, "BLOCK_M": BLOCK_M})]
        chosen += [("donor/donate", {"DIM": dim, "ROTATE": rotate, "TURN": rotate, "TILE": TILE})]
        chosen += [("donor/measure_columns", {"DIM": dim, "ROTATE": rotate, "TILE": COLUMNS})]
        chosen += [("donor/measure_rows", {"DIM": dim, "BLOCK_M": BLOCK_M})] * rotate
    once = [("donor/correct", {"TILE": CORRECTED}), ("donor/choose_shifts", {"TILE": TILE})]
    return chosen + once


def of_loss() -> list[tuple[str, dict[str, Any]]]:
    """(kernel, constants) of the lossy mode's decoder."""
    of_rows = ("count", "classify", "count_escapes", "take")
    chosen: list[tuple[str, dict[str, Any]]] = [(f"lossy/{kernel}", {"TILE": TILE}) for kernel in of_rows]
    chosen += [("lossy/sums", {"BLOCK_M": BLOCK_M, "BLOCK_N": LOSSY_BLOCK_N, "BLOCK_K": BLOCK_K})]
    chosen += [("lossy/values", {"BLOCK_M": lossy_launch.ROWS, "BLOCK_N": LOSSY_BLOCK_N})]
    for dim, rotate in ((128, True), (128, False), (80, True)):
        chosen += [("lossy/finish", {"DIM": dim, "ROTATE": rotate, "TILE": TILE})]
    return chosen


def compile_for(
    kernel: str, constants: dict[str, Any], arch: int, ptx_folder: Path | None = None, **changes: Any
) -> dict[str, Any]:
    """One row. changes: options of the compiler beside the launch code's."""
    function = KERNELS[kernel]
    types = {
        name: OTHERS.get(kernel, {}).get(name) or POINTERS.get(name, "i64" if name == "stream_bytes" else "i32")
        for name in function.arg_names
        if name not in constants
    }
    even = [name for name in types if name not in ODD]
    options = OF_KERNELS.get(kernel, OPTIONS) | changes
    compiled = compile_kernel(function, types, constants, even, arch, options)
    ptx = compiled.asm["ptx"]
    if ptx_folder is not None:
        name = "-".join(str(int(value)) for value in constants.values())
        (ptx_folder / f"{kernel.replace('/', '-')}-{name}-sm_{arch}.ptx").write_text(ptx)
    row = {
        "kernel": kernel if "/" in kernel else f"predict/{kernel}",
        **constants,
        "arch": f"sm_{arch}",
        **resources(compiled, arch),
    }
    row["products"] = sorted(set(PRODUCT.findall(ptx)))
    row["float_divisions"] = len(re.findall(r"\bdiv\.rn\.f32", ptx))
    row["multiplications"] = len(re.findall(r"\bmul\.rn\.f32", ptx))
    # The machine makes a division of fused operations: where there is one, what the assembler gets is looked at; and
    # where nothing is multiplied, for there is nothing to fuse.
    looks = row["multiplications"] and not row["float_divisions"]
    row["fused"] = count_fused(compiled.asm["cubin"]) if looks else len(FUSED.findall(ptx))
    row["flushed"] = len(re.findall(r"\.ftz\b", ptx))
    row["divisions"] = len(re.findall(r"\b(?:div|rem)\.[us]", ptx))
    return row


def count_fused(cubin: bytes) -> int:
    """Multiplications and additions of fp32 in one, in the machine's own code."""
    code = tool("nvdisasm", cubin, "--print-code")
    assert "EXIT" in code
    return len(re.findall(r"\bFFMA", code))


@triton.jit
def fusing_kernel(source, target):
    """What must not be in the others: a product of fp32 and a sum right after it."""
    tl.store(target, tl.load(source) * 3.1 + tl.load(source + 1))


def fused_control() -> int:
    types = {"source": "*fp32", "target": "*fp32"}
    compiled = compile_kernel(fusing_kernel, types, {}, [], 90, {"enable_fp_fusion": True})
    return count_fused(compiled.asm["cubin"])


def main() -> None:
    args = arguments("What the predictive kernels take, compiled for several GPUs.").parse_args()
    with fresh_cache():
        rows = [compile_for(*case, args.ptx) for case in cases(args.few)]
        control = {**compile_for(*cases(args.few)[0], maxnreg=64), "fused": fused_control()}
    report(rows, control, args.json)


if __name__ == "__main__":
    main()
