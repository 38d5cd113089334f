"""Numbers of the types that llama.cpp keeps caches in."""

from __future__ import annotations

GGML_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Those that are stored, as `KVLayout.dtype` has them."""
_NAMES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}


def type_name(kind: int) -> str:
    """Return the name that llama.cpp's settings have for a type.

    Example:
        >>> type_name(8), type_name(99)
        ('q8_0', 'number 99')
    """
    return _NAMES.get(kind, f"number {kind}")


def dtype_of(name: str) -> str | None:
    """Return the dtype of a type that is stored, None of another.

    Example:
        >>> dtype_of("f16"), dtype_of("q8_0")
        ('float16', None)
    """
    return next((GGML_TYPES[kind] for kind, known in _NAMES.items() if known == name and kind in GGML_TYPES), None)
