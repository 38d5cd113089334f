"""Makes the stores that `make test-report` looks at: a small one with everything in it, and one of many blocks.

    python tools/report_stores.py FOLDER [--blocks 100000]

The contents are made up. A reader sees two days of use in the small one, for its clock is wound forward.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch

from kvstore import KVLayout, KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB, MIB

LAYOUT = KVLayout.uniform(4, 2, 64)
VOCABULARY = 3000


def passage(number: int, count: int) -> np.ndarray:
    """Made-up tokens of passage `number`."""
    return np.random.default_rng(number).integers(1, VOCABULARY, count).astype(np.uint32)


class MadeUpCaches:
    """Caches that follow from their tokens, but for a little noise: so the same passage elsewhere is a donor."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._rows = torch.randn(4, 2, 2, VOCABULARY, 64, generator=self._random)
        self._scales = torch.exp(torch.randn(4, 2, 2, 1, 64, generator=self._random))

    def of(self, tokens: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The cache of a sequence."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        noise = 0.05 * torch.randn(4, 2, 2, len(ids), 64, generator=self._random)
        both = ((self._rows[:, :, :, ids] + noise) * self._scales).bfloat16()
        return [(layer[0][None], layer[1][None]) for layer in both]


def make_small(path: Path) -> None:
    """150 conversations over four system prompts and some documents, with sessions, namespaces, donors, a history."""
    draw, caches = np.random.default_rng(0), MadeUpCaches()
    identity = ModelIdentity("example-model", "main", "9f2c41d07b", "", LAYOUT)
    config = StoreConfig(host=TierConfig(32 * MIB, "splitzip"), disk=TierConfig(320 * MIB, "entropy"), learn="off")
    prompts = [passage(number, count) for number, count in ((1, 512), (2, 320), (3, 192), (4, 640))]
    now, before = time.time() - 2 * 86400, list[tuple[np.ndarray, bytes]]()
    with KVStore(path, identity, config) as store:
        recorder = store._engine.recorder
        assert recorder is not None
        recorder._clock = lambda: now
        recorder._before = recorder._look()
        for number in range(150):
            parts = (
                prompts[min(3, int(draw.exponential(1.0)))],
                passage(100 + int(draw.exponential(8)), 256 + 64 * (number % 5)),
                passage(1000 + number, int(draw.integers(20, 300))),
            )
            tokens, namespace = np.concatenate(parts), b"team-a" if number % 7 == 0 else b""
            for _ in range(int(draw.integers(1, 4)) if before else 0):
                old, space = before[int(draw.integers(len(before)))]
                store.get(old[: int(draw.integers(50, len(old)))], namespace=space)
            store.get(tokens, namespace=namespace)
            surprise = -draw.exponential(2.5, len(tokens))
            store.put(tokens, caches.of(tokens), namespace=namespace, logprobs=surprise)
            before.append((tokens, namespace))
            if number % 12 == 0:
                store.session(f"user-{number}", namespace=namespace).point_to(tokens)
            now += 60 * int(draw.integers(5, 20))
            if number % 4 == 3:
                store.flush()
                recorder._due = 0.0
                recorder.tick()


def make_large(path: Path, blocks: int) -> None:
    """So many blocks of four tokens, a hundred of them a sequence; half of each follows one of a few beginnings."""
    draw = np.random.default_rng(1)
    identity = ModelIdentity("example-model", "main", "9f2c41d07b", "", KVLayout.uniform(1, 1, 4))
    config = StoreConfig(
        block_tokens=4, host=TierConfig(0), disk=TierConfig(4 * GIB, "raw"), donors=False, learn="off", threads=1
    )
    begins = [passage(number, 200) for number in range(1, 30)]
    with KVStore(path, identity, config) as store:
        while len(store) < blocks:
            begin = begins[min(28, int(draw.exponential(6)))]
            rest = draw.integers(1, 1 << 20, 400 - len(begin)).astype(np.uint32)
            tokens = np.concatenate([begin[: 4 * int(draw.integers(1, 51))], rest])
            values = torch.zeros(1, len(tokens), 4).bfloat16()
            store.put(tokens, [(values, values)])


def main() -> None:
    """Make both stores anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=100_000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("small", "large"):
        shutil.rmtree(given.folder / name, ignore_errors=True)
    make_small(given.folder / "small")
    make_large(given.folder / "large", given.blocks)


if __name__ == "__main__":
    main()
