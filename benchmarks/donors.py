"""How fast does the content index find donors? How small is it? `python -m benchmarks.donors [--quick] [--json FILE]`

Documents of 2,048 random tokens, in blocks of 64, are put in with one call, as when a store is opened: 10 M tokens (1 M
with --quick). The tokens are in the index of prefixes, whose memory does not count here; the first look-up, which makes
the postings, is part of putting them in. Prompts have 2,048 tokens. Those of the case `hit` are slices of 100 to 500
tokens of stored documents, one after the other, at any offset: no prefix of them is stored. Those of `miss` are new.
Prompts are written just before they are used, as a tokenizer's are. One look-up is one window that winnowing chose in
the prompt; prompts are whole calls of `find`, with verification and the choice of spans. The peer is a dictionary of
n-grams: XXH3 of every window of 16 tokens -> block and offset; it gives matches of one window each, unverified. It
holds a part of the documents (all would take gigabytes and minutes). Values are medians of alternating rounds; every
result is checked off the clock.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from benchmarks.common import Rows, arguments
from kvstore.trie.content import ContentIndex, DonorSpan
from kvstore.trie.index import TrieIndex

U32 = npt.NDArray[np.uint32]
NAMESPACE = b"n" * 32
BLOCK = 64
DOCUMENT = 2048
PROMPT = 2048
VOCABULARY = 50_000
WINDOW = 16
BATCH = 20  # prompts that are written, then used
PROMPTS = 200  # a round
PEER_PROMPTS = 10
PEER_TOKENS = 200_000
ROUNDS = 7


class NgramDict:
    """XXH3 of every window of 16 tokens inside a block -> its place; what one writes first in Python."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}

    def insert(self, tokens: U32) -> None:
        for start in range(0, len(tokens), BLOCK):
            data = tokens[start : start + BLOCK].tobytes()
            for at in range(BLOCK - WINDOW + 1):
                self.places[xxhash.xxh3_64_intdigest(data[at * 4 : (at + WINDOW) * 4])] = start + at

    def find(self, tokens: U32) -> list[tuple[int, int]]:
        data, get = tokens.tobytes(), self.places.get
        found = []
        for at in range(len(tokens) - WINDOW + 1):
            place = get(xxhash.xxh3_64_intdigest(data[at * 4 : (at + WINDOW) * 4]))
            if place is not None:
                found.append((at, place))
        return found

    def bytes(self) -> int:
        return sys.getsizeof(self.places) + len(self.places) * (sys.getsizeof(1 << 60) + sys.getsizeof(1 << 20))


def slices(stored: U32, rng: np.random.Generator) -> U32:
    """A prompt of slices of stored documents."""
    parts: list[U32] = []
    while sum(map(len, parts)) < PROMPT:
        length = int(rng.integers(100, 501))
        document = int(rng.integers(0, len(stored) // DOCUMENT)) * DOCUMENT
        start = document + int(rng.integers(0, DOCUMENT - length + 1))
        parts.append(stored[start : start + length])
    return np.concatenate(parts)[:PROMPT]


def rate(find: Callable[[U32], Sequence[object]], prompts: list[U32], check: Callable[[object], None]) -> float:
    """Prompts a second."""
    seconds = 0.0
    for first in range(0, len(prompts), BATCH):
        batch = [prompt.copy() for prompt in prompts[first : first + BATCH]]
        start = time.perf_counter()
        found = [find(prompt) for prompt in batch]
        seconds += time.perf_counter() - start
        for result in found:
            check(result)
    return len(prompts) / seconds


def windows_of(prompts: list[U32]) -> float:
    """Windows that winnowing chooses a prompt: what an index posts for it."""
    counts = []
    for prompt in prompts:
        scratch = ContentIndex(seed=0)
        scratch.insert(NAMESPACE, 1, 0, prompt)
        counts.append(scratch.stats()["entries"])
    return statistics.mean(counts)


def covered(result: object) -> float:
    spans: list[DonorSpan] = result  # type: ignore[assignment]
    return sum(span.length for span in spans) / PROMPT


def check_hit(result: object) -> None:
    if covered(result) < 0.75:
        raise AssertionError(f"donors for {covered(result):.0%} of a prompt that is stored in slices")


def check_miss(result: object) -> None:
    if result:
        raise AssertionError("a donor for a new prompt")


def measure(rows: Rows, name: str, count: int) -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(0, VOCABULARY, count // DOCUMENT * DOCUMENT, dtype=np.uint32)
    blocks = len(stored) // BLOCK
    records = np.arange(1, blocks + 1, dtype=np.uint64)
    parents = np.where((records - 1) % (DOCUMENT // BLOCK) == 0, 0, records - 1).astype(np.uint64)
    counts = np.full(blocks, BLOCK, np.uint32)
    trie, ends = TrieIndex(BLOCK), np.arange(BLOCK, DOCUMENT + 1, BLOCK, dtype=np.uint32)
    for document, numbers in zip(stored.reshape(-1, DOCUMENT), records.reshape(-1, len(ends)), strict=True):
        trie.insert(NAMESPACE, document, ends, numbers)
    seconds = []
    for _ in range(3):
        index = ContentIndex(trie=trie, seed=0)
        start = time.perf_counter()
        index.insert_many([NAMESPACE], np.zeros(blocks, np.uint32), records, parents, counts, None)
        index.find(NAMESPACE, stored[:WINDOW])
        seconds.append(time.perf_counter() - start)
    stats = index.stats()

    peer, part = NgramDict(), stored[: min(PEER_TOKENS, len(stored)) // DOCUMENT * DOCUMENT]
    start = time.perf_counter()
    peer.insert(part)
    peer_insert = len(part) / (time.perf_counter() - start)
    insert = len(stored) / statistics.median(seconds)
    rows.add(f"donor/index/insert/{name}", "tokens_per_s", insert, "1/s", "ngram-dict", insert / peer_insert)
    size, peer_size = stats["bytes"] / stats["tokens"], peer.bytes() / len(part)
    rows.add(f"donor/index/memory/{name}", "bytes_per_token", size, "B", "ngram-dict", size / peer_size)

    prompts = {
        "hit": [slices(stored, rng) for _ in range(PROMPTS)],
        "miss": [rng.integers(0, VOCABULARY, PROMPT, dtype=np.uint32) for _ in range(PROMPTS)],
    }
    peer_prompts = {"hit": [slices(part, rng) for _ in range(PEER_PROMPTS)], "miss": prompts["miss"][:PEER_PROMPTS]}
    checks = {"hit": check_hit, "miss": check_miss}
    rates: dict[str, list[float]] = {case: [] for case in prompts}
    peer_rates: dict[str, list[float]] = {case: [] for case in prompts}
    for _ in range(ROUNDS):
        for case in prompts:
            rates[case].append(rate(lambda tokens: index.find(NAMESPACE, tokens), prompts[case], checks[case]))
            peer_rates[case].append(rate(peer.find, peer_prompts[case], lambda _: None))
    for case in prompts:
        ours, theirs = statistics.median(rates[case]), statistics.median(peer_rates[case])
        lookups, peer_lookups = ours * windows_of(prompts[case]), theirs * (PROMPT - WINDOW + 1)
        prefix = f"donor/index/{case}/{name}"
        rows.add(prefix, "lookups_per_s", lookups, "1/s", "ngram-dict", lookups / peer_lookups)
        rows.add(prefix, "prompts_per_s", ours, "1/s", "ngram-dict", ours / theirs)
    found = [covered(index.find(NAMESPACE, prompt)) for prompt in prompts["hit"]]
    rows.add(f"donor/index/hit/{name}", "covered", statistics.mean(found), "share")


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows = Rows("donors", options.json)
    gc.disable()  # nothing here makes cycles, and a collection walks every n-gram
    sizes = {"1M": 1_000_000} if options.quick else {"10M": 10_000_000}
    for name, count in sizes.items():
        measure(rows, name, count)
    rows.main_exit()


if __name__ == "__main__":
    main()
