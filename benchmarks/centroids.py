"""Should the trie choose donors? `python -m benchmarks.centroids [--documents 4] [--codec entropy]`

A document is stored behind several beginnings, each copy standing by itself (pinned), and then comes behind another
one, `PROMPT`. Against which copy is it coded? Rows `centroids/WAY`, `ratio`: raw / stored bytes of what prefix hashing
has to store of the last arrivals, over all documents:

- `content`: the store's own choice, by the content index, with all copies there.
- `nearest`, `best-match`, `centroid`: only the copy there that the trie names: the least `distance`, the most
  `shared_bits`, the most probable one. Bits are the model's own.
- `best`, `worst`: the best and the worst single copy, which takes coding against each.
- `path`: what is there is the whole sequence whose leaf is nearest among sequences of which most have other documents,
  as in a store: `trie_finds`, the share of documents for which that one has the document at all.

The peer of each is `content`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import MIB, Rows, arguments, scratch
from benchmarks.conversations import load_model
from benchmarks.prior import NAMESPACE, bits_of
from benchmarks.workloads.caches import computed, put
from benchmarks.workloads.text import Text
from benchmarks.workloads.variants import BASE, NEAR_SYNONYM, OTHER_INSTRUCTION
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.config import GIB
from kvstore.trie import TrieIndex

PROMPT = NEAR_SYNONYM
DOCUMENT, COMPANY = 448, 192  # tokens


def main() -> None:
    parser = arguments("Donors chosen by their content and by the trie.")
    parser.add_argument("--documents", type=int, help="how many (4)")
    parser.add_argument("--codec", default="entropy", help="of what has no donor, one that needs no profile (entropy)")
    args = parser.parse_args()
    count = args.documents or (2 if args.quick else 4)
    rows, (model, tokenizer) = Rows("centroids", args.json), load_model(args.model)
    text = Text(tokenizer, args.text, (count + 1) * (DOCUMENT + 2 * COMPANY))
    documents = [text.take(DOCUMENT) for _ in range(count)]
    asked = [arrival(text, document) for document in documents]
    copies = [beginnings(text, document) for document in documents]
    index = TrieIndex(block_tokens=64)
    leaves = {(n, name): ids for n, each in enumerate(copies) for name, ids in each.items()}
    with scratch("centroids", None) as folder, torch.inference_mode():
        for number, ids in enumerate([*leaves.values(), *asked], 1):
            ends, record = np.array([len(ids)], np.uint32), np.array([number], np.uint64)
            index.insert(NAMESPACE, ids, ends, record, bits=bits_of(model, ids))
        choices = [chosen(index, ids, each) for ids, each in zip(asked, copies, strict=True)]
        found = [nearest_of_all(index, ids, leaves)[0] == n for n, ids in enumerate(asked)]
        bench = Bench(model, folder, args.codec)
        raw, stored = 0, dict[str, int]()
        for ids, each, choice in zip(asked, copies, choices, strict=True):
            alone = {name: bench.bytes_behind({name: copy}, ids) for name, copy in each.items()}
            new, everything = bench.bytes_behind(each, ids)
            raw += new
            sizes = {name: size for name, (_, size) in alone.items()}
            ways = {"content": everything, "best": min(sizes.values()), "worst": max(sizes.values())}
            for way, size in (ways | {way: sizes[name] for way, name in choice.items()}).items():
                stored[way] = stored.get(way, 0) + size
    for way, size in stored.items():
        peer = () if way == "content" else ("content", stored["content"] / size)
        rows.add(f"centroids/{way}", "ratio", raw / size, "raw bytes / stored bytes", *peer)
    rows.add("centroids/path", "trie_finds", sum(found) / count, "of documents")
    rows.main_exit()


def arrival(text: Text, document: list[int]) -> np.ndarray:
    return np.array(text.system(PROMPT) + text.ids("<|im_start|>user\n") + document, np.uint32)


def beginnings(text: Text, document: list[int]) -> dict[str, np.ndarray]:
    """The document behind like prompts, another one, and the arrival's own prompt with other text between."""
    user = text.ids("<|im_start|>user\n")
    heads = {
        "like": text.system(BASE) + user,
        "like-ending": text.system(PROMPT.replace("mail", "letters")) + user,
        "other": text.system(OTHER_INSTRUCTION) + user,
        "company": text.system(PROMPT) + user + text.take(COMPANY),
    }
    return {name: np.array(head + document, np.uint32) for name, head in heads.items()}


def chosen(index: TrieIndex, ids: np.ndarray, copies: dict[str, np.ndarray]) -> dict[str, str]:
    """The copy that each way names."""
    return {
        "nearest": min(copies, key=lambda name: index.distance(NAMESPACE, ids, copies[name])),
        "best-match": max(copies, key=lambda name: index.shared_bits(NAMESPACE, ids, copies[name])),
        "centroid": min(copies, key=lambda name: index.bits(NAMESPACE, copies[name])),
    }


def nearest_of_all(index: TrieIndex, ids: np.ndarray, leaves: dict[tuple[int, str], np.ndarray]) -> tuple[int, str]:
    """The document and the beginning of the nearest stored sequence."""
    return min(leaves, key=lambda leaf: index.distance(NAMESPACE, ids, leaves[leaf]))


class Bench:
    """Codes arrivals against copies, each time in a new store of `folder` that has nothing else."""

    def __init__(self, model: Any, folder: Path, codec: str) -> None:
        self._model, self._folder, self._made = model, folder, 0
        disk = TierConfig(GIB, codec)
        self._config = StoreConfig(host=TierConfig(0), disk=disk, learn="off", segment_bytes=4 * MIB)
        self._identity = ModelIdentity.from_transformers(model)
        self._caches: dict[bytes, Any] = {}

    def bytes_behind(self, copies: dict[str, np.ndarray], ids: np.ndarray) -> tuple[int, int]:
        """(raw, stored bytes) that an arrival takes behind copies that stand alone."""
        self._made += 1
        with KVStore(self._folder / str(self._made), self._identity, self._config) as store:
            for copy in copies.values():
                store.put(copy, self._layers(store, copy), pin=True)
                store.flush()
            size, new = put(store, ids, self._layers(store, ids))
        return new, size

    def _layers(self, store: KVStore, ids: np.ndarray) -> Any:
        """Computed whole: what is stored is the same in all stores."""
        key = ids.tobytes()
        if key not in self._caches:
            with KVStore(self._folder / "none", self._identity, self._config) as empty:
                self._caches[key] = computed(self._model, empty, ids)
        return self._caches[key]


if __name__ == "__main__":
    main()
