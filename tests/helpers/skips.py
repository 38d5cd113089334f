"""Why tests were skipped, and which reasons are in order: a test that is skipped for another one has failed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

ALLOWED = (
    r"there is no CUDA device",
    r"there is no C compiler",
    r"only at full length: calibrations take seconds",
    r"this machine has no (avx2|avx512|amx|neon)",
    r"this machine cannot flush",  # subnormal numbers to zero
    r"the sanitizer has its own heap",  # in `make test-asan`
    r"only glibc gives memory back",
    r"(zipnn|pcodec|zstandard|lz4) is not installed",  # peers that benchmarks compare with
    r"could not import 'matplotlib'",  # of the extra `bench`
    r"could not import 'ray'",  # of the extra `ray`; `make test-ray` installs it beside
    r"could not import '(lmcache|sglang|vllm)'",  # `make test-lmcache` and others install them beside
    r"could not import '(peft|xllamacpp)'",  # where the extra `test` was installed before it had them
    r"there is no compiler for aarch64 with qemu-user; make test-aarch64 installs them",
    r"vLLM is not installed here; make test-vllm installs it beside",
    r"Mooncake is not installed here; make test-remote installs it beside",
)


def reason_of(text: str) -> str:
    """The reason alone, without what pytest writes before it."""
    return text.removeprefix("Skipped: ").partition(": No module named")[0]


def summary(reasons: Iterable[str]) -> str:
    """`44 skipped: 40 there is no CUDA device; 4 this machine has no avx512`."""
    found = Counter(reasons)
    parts = "; ".join(f"{count} {reason}" for reason, count in found.most_common())
    return f"{found.total()} skipped: {parts}" if found else "nothing skipped"


def not_allowed(reasons: Iterable[str]) -> list[str]:
    return sorted({reason for reason in reasons if not any(re.fullmatch(known, reason) for known in ALLOWED)})
