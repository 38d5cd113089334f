"""What the model says of the tokens: `python -m benchmarks.prior [--windows 8]`

Of held-out text, in windows of 1,024 tokens:

- `prefill/TOKENS`: a prompt computed and put into a store in memory, with `score_prompts` and without, in turns.
  `processor_s`: medians; the peer of `scored` is `plain`. `peak_bytes`: the most memory over that before the call.
- `prompt`: bits a token of the prompts in the trie, `scored` and `plain`; the peer is the model's own surprisal from
  one pass over all, `surprisal` (each prompt's first token is left out). The bits that the `tokens` codec takes for a
  text are a row of `benchmarks.archives`.
- `position/FIRST`: of tokens from FIRST to twice that: `surprisal` (bits a token), and what the exact codec `entropy`
  takes of their cache (`entropy_bits`, a value). The peer of both is the first such part.
- `token`: whether keys and values say what their token was. `distinct_share`: of the vocabulary, how many tokens have
  values in the first layer that no other has. `same_again_share`: how many windows give the same bits twice in the same
  passes, and `same_in_pieces_share`: how many values of a cache are the same if it is computed in four pieces.
- `prompts/NAME`: two prompts, "You are a helpful assistant." and "You are an AI assistant.", before the same 1,000
  tokens (`paper`), before different ones (`crossed`), and the first before both (`others`). In bits: what both begin
  with (`shared`, which the paper calls their distance) and `distance`, what is below that. `clusters` at a radius of 64
  bits, and `clusters_wide` at one a little above the distance. `found_share`: of the tokens behind the prompt, how many
  the content index finds in the other one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.archives import entropy_bits, surprisal_of
from benchmarks.common import MIB, Rows, arguments, interleave, scratch
from benchmarks.conversations import load_model
from benchmarks.peers.quality.data import LENGTH, cut, test_text
from benchmarks.workloads.text import Text
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig
from kvstore.core.keys import namespace_digest
from kvstore.integrations.transformers import get_or_prefill
from kvstore.integrations.transformers.passes import empty_cache, run_pass
from kvstore.trie import Clusters, TrieIndex, bits_from_logprobs
from kvstore.trie.content import ContentIndex

PROMPTS = ("You are a helpful assistant.", "You are an AI assistant.")
DOCUMENT, RADIUS = 1000, 64.0
NAMESPACE = bytes(32)
BLOCK = 64


def main() -> None:
    parser = arguments("The model's probabilities of tokens: what they cost, and what follows from them.")
    parser.add_argument("--windows", type=int, help="of held-out text (8)")
    args = parser.parse_args()
    windows = args.windows or (2 if args.quick else 8)
    rows = Rows("prior", args.json)
    model, tokenizer = load_model(args.model)
    ids = cut(tokenizer, test_text(args.text, None, windows), windows)
    with scratch("prior", None) as folder, torch.inference_mode():
        scored = prompts_in_a_store(rows, model, folder, ids)
        by_position(rows, model, ids, scored)
        tokens_in_caches(rows, model, ids)
        two_prompts(rows, model, Text(tokenizer, args.text, 4 * DOCUMENT))
        for count in (256, LENGTH):
            cost(rows, model, folder, ids[:, :count], 3 if args.quick else 7)
    rows.main_exit()


def opened(folder: Path, model: Any, scored: bool) -> KVStore:
    """A store in memory."""
    config = StoreConfig(host=TierConfig(512 * MIB, "raw"), disk=TierConfig(0), score_prompts=scored)
    return KVStore(folder / f"store-{scored}", ModelIdentity.from_transformers(model), config)


def prompts_in_a_store(rows: Rows, model: Any, folder: Path, ids: torch.Tensor) -> np.ndarray:
    """Rows of the bits of prompts; returns the bits of each token, `[windows, 1024]`."""
    own, kept = sum(surprisal_of(model, window) for window in ids) / len(ids) / (LENGTH - 1), []
    rows.add("prompt/surprisal", "bits_per_token", own, "bits")
    for scored in (True, False):
        with opened(folder, model, scored) as store:
            put, total = store._put, 0.0

            def noted(*given: Any, _put: Callable[..., Any] = put, **more: Any) -> Any:
                kept.append(given[3])
                return _put(*given, **more)

            store._put = noted  # type: ignore[method-assign]
            some = ids if scored else ids[:1]  # without the model's word every token counts alike
            for window in some:
                tokens = window.numpy().astype(np.uint32)
                get_or_prefill(store, tokens, model)
                total += store._residency.index.match(namespace_digest(b""), tokens).bits - 16
            case, each = "prompt/scored" if scored else "prompt/plain", total / len(some) / (LENGTH - 1)
            rows.add(case, "bits_per_token", each, "bits", "surprisal", each / own)
    return np.stack([bits_from_logprobs(each, LENGTH) for each in kept if each is not None])


def by_position(rows: Rows, model: Any, ids: torch.Tensor, bits: np.ndarray) -> None:
    """Rows of what tokens and their cache take, by how much stands before them."""
    values = sum(x.heads * (x.key_dim + x.value_dim) for x in layers_of(model))
    caches, edges = [computed(model, window) for window in ids], (64, 128, 256, 512, LENGTH)
    first: tuple[float, float] | None = None
    for begin, end in zip((1, *edges[:-1]), edges, strict=True):
        surprisal, start = float(bits[:, begin:end].mean()), begin // BLOCK * BLOCK
        spent = sum(
            entropy_bits(model, window[start:end], cut_cache(cache, start, end))
            for window, cache in zip(ids, caches, strict=True)
        )
        each = spent / (len(ids) * (end - start) * values)
        first = first or (surprisal, each)
        rows.add(f"position/{begin}", "surprisal", surprisal, "bits a token", "the first", surprisal / first[0])
        rows.add(f"position/{begin}", "entropy_bits", each, "bits a value", "the first", each / first[1])


def tokens_in_caches(rows: Rows, model: Any, ids: torch.Tensor) -> None:
    """Rows of what caches and tokens say of each other."""
    layer = model.model.layers[0]
    embedded = layer.input_layernorm(model.model.embed_tokens(torch.arange(model.config.vocab_size)))
    values = layer.self_attn.v_proj(embedded).view(torch.int16).numpy()
    _, counts = np.unique(values, axis=0, return_counts=True)
    rows.add("token", "distinct_share", int((counts == 1).sum()) / len(values), "of the vocabulary")
    same, pieces = 0, 0.0
    for window in ids[:2]:
        once, again, parts = computed(model, window), computed(model, window), computed(model, window, LENGTH // 4)
        same += all(torch.equal(a, b) for a, b in zip(tensors(once), tensors(again), strict=True))
        equal = [(a == b).double().mean() for a, b in zip(tensors(once), tensors(parts), strict=True)]
        pieces += float(torch.stack(equal).mean())
    rows.add("token", "same_again_share", same / len(ids[:2]), "of windows")
    rows.add("token", "same_in_pieces_share", pieces / len(ids[:2]), "of values")


def two_prompts(rows: Rows, model: Any, text: Text) -> None:
    """Rows of the paper's two prompts."""
    document, other = text.take(DOCUMENT), text.take(DOCUMENT)
    first, second = (text.system(prompt) for prompt in PROMPTS)
    pairs = {"paper": second + document, "crossed": second + other, "others": first + other}
    for name, q in pairs.items():
        p = first + document
        index = TrieIndex(block_tokens=BLOCK)
        for number, tokens in enumerate((p, q), 1):
            ids = np.array(tokens, np.uint32)
            ends, records = np.array([len(ids)], np.uint32), np.array([number], np.uint64)
            index.insert(NAMESPACE, ids, ends, records, bits=bits_of(model, ids))
        pair = np.array(p, np.uint32), np.array(q, np.uint32)
        distance = index.distance(NAMESPACE, *pair)
        rows.add(f"prompts/{name}", "shared", index.shared_bits(NAMESPACE, *pair), "bits")
        rows.add(f"prompts/{name}", "distance", distance, "bits")
        for metric, radius in (("clusters", RADIUS), ("clusters_wide", 1.01 * distance)):
            clusters = Clusters(index, radius)
            clusters.load()
            rows.add(f"prompts/{name}", metric, len(clusters.clusters()), f"at a radius of {radius:.0f} bits")
        rows.add(f"prompts/{name}", "found_share", found_share(p, q, len(first)), "of tokens behind the prompt")


def found_share(stored: list[int], asked: list[int], begin: int) -> float:
    """Of the tokens from `begin` on, how many the content index finds in a stored sequence."""
    content, ids = ContentIndex(), np.array(stored, np.uint32)
    for number, start in enumerate(range(0, len(ids) - BLOCK + 1, BLOCK), 1):
        content.insert(NAMESPACE, number, number - 1, ids[start : start + BLOCK])
    spans = content.find(NAMESPACE, np.array(asked, np.uint32))
    return sum(max(0, span.start + span.length - max(begin, span.start)) for span in spans) / (len(asked) - begin)


def cost(rows: Rows, model: Any, folder: Path, ids: torch.Tensor, repeats: int) -> None:
    """Rows of what scoring takes."""
    count, turn = ids.shape[1], iter(range(1 << 30))
    with opened(folder, model, True) as scored, opened(folder, model, False) as plain:
        stores, peaks = {"scored": scored, "plain": plain}, {"scored": 0, "plain": 0}

        def run(name: str) -> None:
            tokens = ids[next(turn) % len(ids)].numpy().astype(np.uint32)
            tokens[0] = next(turn)  # nothing of it is stored
            before = peak(reset=True)
            get_or_prefill(stores[name], tokens, model)
            peaks[name] = max(peaks[name], peak() - before)

        taken = interleave({name: lambda name=name: run(name) for name in stores}, repeats, time.process_time)
    for name in stores:
        peer = ("plain", taken[name] / taken["plain"]) if name == "scored" else ()
        rows.add(f"prefill/{count}/{name}", "processor_s", taken[name], "s", *peer)
        rows.add(f"prefill/{count}/{name}", "peak_bytes", peaks[name], "bytes over that before the call")


def peak(reset: bool = False) -> int:
    """The most memory that this process had at once, or has now if it is to be counted from now on."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def bits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """The surprisal of each token; 16 bits of the first."""
    logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].float().log_softmax(-1)
    found = logits.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    return np.concatenate([np.array([16.0], np.float32), (-found / np.log(2)).numpy()])


def computed(model: Any, ids: torch.Tensor, piece: int = LENGTH) -> Any:
    cache = empty_cache(model)
    for begin in range(0, len(ids), piece):
        run_pass(model, ids[begin : begin + piece], cache)
    return cache


def tensors(cache: Any) -> list[torch.Tensor]:
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def layers_of(model: Any) -> Any:
    return ModelIdentity.from_transformers(model).layout.layers


def cut_cache(cache: Any, begin: int, end: int) -> Any:
    return [(layer.keys[..., begin:end, :], layer.values[..., begin:end, :]) for layer in cache.layers]


if __name__ == "__main__":
    main()
