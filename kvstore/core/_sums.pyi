# fmt: off
from collections.abc import Sequence

from typing_extensions import Buffer

LEAST_BYTES: int
LEAST_BYTES_64: int

def xxh3_64_each(data: Buffer, sizes: Sequence[int], level: str | None = None) -> bytes: ...
def xxh3_128(data: Buffer, level: str | None = None) -> bytes: ...
