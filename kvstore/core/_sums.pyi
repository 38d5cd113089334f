# fmt: off
from typing_extensions import Buffer

LEAST_BYTES: int

def xxh3_128(data: Buffer, level: str | None = None) -> bytes: ...
