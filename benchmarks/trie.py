"""How fast is the index, and how small? `python -m benchmarks.trie [--quick] [--json FILE]`

Prefixes of 500 to 2,000 tokens begin with one of 500 system prompts (256 to 1,024 tokens, Zipf); 100 k and
1 M of them (20 k with --quick). Every insert carries its record ids, as a store's does; look-ups ask for
whole stored prefixes in random order. Queries are written just before they are used, as a tokenizer's are:
what is stored is cold, the query is not. The peers are what serving engines use: a dict from SHA-256 block
chains to records, in blocks of 64 and of 16 tokens, on the same prefixes in the same run, in alternating
rounds. Values are medians over rounds. As much memory as the trie will take is touched and given back first: a virtual
machine gets its memory from its host at the first touch, at 3 microseconds an insert, which is not the trie's doing and
happens once in the machine's life. Memory is the whole index divided by the distinct tokens stored; the
dict's leaves out the tokens, which it cannot give back.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.common import Rows, arguments
from kvstore.trie import TrieIndex

U32 = npt.NDArray[np.uint32]
NAMESPACE = b"n" * 32
BLOCK = 64
CHUNK = 5_000  # prefixes made at a time
BATCH = 50  # queries that are written, then looked up: they fit a cache, as a tokenizer's output does
ROUNDS = 7
PROBES = 5_000  # look-ups a round
PEER_PROBES = 300
PEER_PREFIXES = 20_000  # all that the dicts hold; a million would take them minutes to hash


class ChainDict:
    """Block chains as vLLM and SGLang-like engines keep them: SHA-256(parent digest + tokens of the block)
    -> record."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.records: dict[bytes, int] = {}

    def insert(self, tokens: U32, record: int) -> None:
        parent = b""
        for start in range(0, len(tokens) - self.block + 1, self.block):
            parent = hashlib.sha256(parent + tokens[start : start + self.block].tobytes()).digest()
            self.records.setdefault(parent, record)

    def longest_prefix(self, tokens: U32) -> int:
        parent = b""
        for start in range(0, len(tokens) - self.block + 1, self.block):
            parent = hashlib.sha256(parent + tokens[start : start + self.block].tobytes()).digest()
            if parent not in self.records:
                return start
        return len(tokens) // self.block * self.block

    def bytes(self) -> int:
        return sys.getsizeof(self.records) + len(self.records) * (sys.getsizeof(b"x" * 32) + sys.getsizeof(1 << 20))


def prefixes(count: int, seed: int) -> Iterator[list[U32]]:
    """Chunks of prefixes; memory for one chunk at a time."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 50_000, n, dtype=np.uint32) for n in rng.integers(256, 1025, 500)]
    share = 1 / np.arange(1, 501)
    share /= share.sum()
    for first in range(0, count, CHUNK):
        n = min(CHUNK, count - first)
        chosen = rng.choice(500, n, p=share)
        # A request is a whole prompt and something after it.
        least = np.array([max(500, len(prompts[prompt]) + 16) for prompt in chosen])
        lengths = rng.integers(least, 2001)
        tokens = rng.integers(0, 50_000, int(lengths.sum()), dtype=np.uint32)
        stops = np.cumsum(lengths)
        for prompt, start in zip(chosen, stops - lengths, strict=True):
            tokens[start : start + len(prompts[prompt])] = prompts[prompt]
        yield np.split(tokens, stops[:-1])


def insert_chunk(index: TrieIndex, chunk: list[U32], next_id: int) -> tuple[float, int]:
    """Seconds that the inserts took; finding out which blocks are new is the store's look-up and not part
    of them."""
    seconds = 0.0
    for first in range(0, len(chunk), BATCH):
        jobs = []
        for tokens in chunk[first : first + BATCH]:
            known = index.longest_prefix(NAMESPACE, tokens) // BLOCK * BLOCK
            ends = np.arange(known + BLOCK, len(tokens) + 1, BLOCK, dtype=np.uint32)
            if len(tokens) % BLOCK:
                ends = np.append(ends, np.uint32(len(tokens)))
            jobs.append((tokens, ends, np.arange(next_id, next_id + len(ends), dtype=np.uint64)))
            next_id += len(ends)
        start = time.perf_counter()
        for tokens, ends, ids in jobs:
            index.insert(NAMESPACE, tokens, ends, ids)
        seconds += time.perf_counter() - start
    return seconds, next_id


def lookup_rate(
    look_up: Callable[[U32], int], probes: list[U32], count: int, rng: np.random.Generator, step: int
) -> float:
    """Look-ups a second of `count` random probes; every result is checked, at the granularity `step`, off
    the clock."""
    seconds, chosen = 0.0, rng.permutation(len(probes))[:count]
    for first in range(0, len(chosen), BATCH):
        batch = [probes[i].copy() for i in chosen[first : first + BATCH]]
        start = time.perf_counter()
        found = [look_up(tokens) for tokens in batch]
        seconds += time.perf_counter() - start
        if found != [len(tokens) // step * step for tokens in batch]:
            raise AssertionError("a stored prefix was not found in full")
    return len(chosen) / seconds


def touch_memory(nbytes: int) -> None:
    np.ones(nbytes, np.uint8)


def measure(rows: Rows, name: str, count: int) -> None:
    touch_memory(max(4 << 30, count * 4_000))
    index = TrieIndex(BLOCK)
    peers = {block: ChainDict(block) for block in (64, 16)}
    rng = np.random.default_rng(1)
    probes: list[U32] = []
    peer_probes: list[U32] = []
    insert_rates: list[float] = []
    peer_rates: dict[int, list[float]] = {block: [] for block in peers}
    next_id = 1
    keep = min(1.0, 4 * PROBES / count)
    for chunk in prefixes(count, seed=0):
        seconds, next_id = insert_chunk(index, chunk, next_id)
        insert_rates.append(len(chunk) / seconds)
        # Each chunk also goes to the peers, in part: at 20 microseconds a block they would take hours for
        # all.
        sample = chunk[: max(1, PEER_PREFIXES * len(chunk) // count)]
        for block, peer in peers.items():
            start = time.perf_counter()
            for tokens in sample:
                peer.insert(tokens, next_id)
            peer_rates[block].append(len(sample) / (time.perf_counter() - start))
        probes += [tokens.copy() for tokens in chunk if rng.random() < keep]
        peer_probes += [tokens.copy() for tokens in sample if rng.random() < keep]
    stats = index.stats()
    peer_tokens = {block: len(peer.records) * block for block, peer in peers.items()}

    insert_rate = statistics.median(insert_rates)
    for block in peers:
        peer_rate = statistics.median(peer_rates[block])
        rows.add(f"{name}/insert/sha256-dict-{block}", "inserts_per_s", peer_rate, "1/s")
    peer_rate = statistics.median(peer_rates[64])
    rows.add(f"{name}/insert", "inserts_per_s", insert_rate, "1/s", "sha256-dict-64", insert_rate / peer_rate)

    rates: dict[str, list[float]] = {"trie": [], "64": [], "16": []}
    look_up = functools.partial(index.longest_prefix, NAMESPACE)
    for _ in range(ROUNDS):
        rates["trie"].append(lookup_rate(look_up, probes, PROBES, rng, 1))
        for block, peer in peers.items():
            rates[str(block)].append(lookup_rate(peer.longest_prefix, peer_probes, PEER_PROBES, rng, block))
    median = {which: statistics.median(values) for which, values in rates.items()}
    for block in peers:
        rows.add(f"{name}/lookup/sha256-dict-{block}", "lookups_per_s", median[str(block)], "1/s")
    rows.add(f"{name}/lookup", "lookups_per_s", median["trie"], "1/s", "sha256-dict-64", median["trie"] / median["64"])

    per_token = stats["bytes"] / stats["tokens"]
    peer_size = {block: peer.bytes() / peer_tokens[block] for block, peer in peers.items()}
    for block in peers:
        rows.add(f"{name}/memory/sha256-dict-{block}", "bytes_per_token", peer_size[block], "B")
    rows.add(f"{name}/memory", "bytes_per_token", per_token, "B", "sha256-dict-16", per_token / peer_size[16])


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = Rows("trie", options.json)
    gc.disable()  # nothing here makes cycles, and a collection walks every probe
    sizes = {"20k": 20_000} if options.quick else {"100k": 100_000, "1M": 1_000_000}
    for name, count in sizes.items():
        measure(rows, f"trie/{name}", count)
    rows.main_exit()


if __name__ == "__main__":
    main()
