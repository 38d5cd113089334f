"""What a session that grows takes of the disk, for each way in which layers keep tokens or states.

`python -m benchmarks.growing [--quick] [--only NAME ...] [--json FILE]`. Small models with chance weights (the tests'
own, with wider heads) of the kinds Gemma 3, gpt-oss, Mistral, Llama 4, Qwen3-Next, Mamba2 and Falcon-H1, windows of 24
tokens. Six turns of 90 tokens and more: each is put, the store is closed and opened, and the next goes on from what
comes back. Rows: bytes of records after the last turn, and of the caches at the ends of all turns, each of which can be
resumed; the same of the first turn alone. Weights are chance, so ratios say nothing; what is stored how often does.
Status 1 if a turn did not come back bit for bit, or if the store takes more than the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Rows, arguments, scratch, use_helpers_of_tests
from kvstore import KVStore, ModelIdentity, StoreConfig, TierConfig

NAMES = ("gemma3", "gpt-oss", "mistral", "llama4", "qwen3-next", "mamba2", "falcon-h1")
TURNS, FIRST, MORE = 6, 150, 90
_WIDER: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "state_size": 64},
    "falcon-h1": {"head_dim": 64, "num_key_value_heads": 4, "mamba_d_state": 64},
    "qwen3-next": {"head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
CONFIG = StoreConfig(host=TierConfig(0), disk=TierConfig(1 << 30, "entropy"), segment_bytes=16 << 20)


@dataclass(frozen=True)
class Turn:
    """The end of one turn.

    Attributes:
        tokens: of the sequence.
        resumed: tokens that came back from the store before it.
        cache_bytes: of the cache at its end, in memory.
        stored_bytes: of records that it added to the disk.
        is_exact: whether what came back equals that cache, bit for bit.
    """

    tokens: int
    resumed: int
    cache_bytes: int
    stored_bytes: int
    is_exact: bool


def main() -> None:
    use_helpers_of_tests()
    parser = arguments("What a session that grows takes of the disk, by kind of layers.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, good = Rows("growing", args.json), True
    for name in args.only or (NAMES[:2] if args.quick else NAMES):
        with scratch("growing") as folder:
            turns = grown(name, folder, CONFIG)
        for case, part in (("first-turn", turns[:1]), ("all-turns", turns)):
            cache, stored = (sum(getattr(turn, field) for turn in part) for field in ("cache_bytes", "stored_bytes"))
            rows.add(f"{name}/{case}", "cache_bytes", cache, "bytes")
            rows.add(f"{name}/{case}", "stored_bytes", stored, "bytes", "cache_bytes", stored / cache)
            good &= stored <= cache
        good &= all(turn.is_exact for turn in turns)
    rows.main_exit(good)


def grown(name: str, folder: Path, config: StoreConfig) -> list[Turn]:
    """The turns of a session in a store in `folder`, which is closed and opened after each."""
    from tiny_models import tiny_of_kind

    model = tiny_of_kind(name, **_WIDER.get(name, {"head_dim": 64, "num_key_value_heads": 4}))
    identity = ModelIdentity.from_transformers(model)
    ids = torch.randint(1, 190, (1, FIRST + (TURNS - 1) * (MORE + 20)), generator=torch.Generator().manual_seed(5))
    turns: list[Turn] = []
    end = 0
    for number in range(TURNS):
        before, end = end, FIRST + number * (MORE + 4 * number)
        with KVStore(folder / "store", identity, config) as store:
            turns.append(_turn(model, store, ids, before, end))
    return turns


def _turn(model: Any, store: KVStore, ids: torch.Tensor, before: int, end: int) -> Turn:
    from transformers import DynamicCache

    from kvstore.integrations.transformers.feeding import advance

    hit = store.session("s").resume() if before else None
    cache = DynamicCache(config=model.config) if hit is None else hit.cache()
    advance(model, cache, before, ids[:, before:end], torch.arange(before, end)[None])
    disk = store.stats()["disk"]
    store.session("s").save(ids[0, :end].tolist(), cache)
    store.flush()
    after, again = store.stats()["disk"], store.session("s").resume()
    assert again is not None
    return Turn(
        end,
        0 if hit is None else hit.tokens,
        _bytes(cache),
        after["bytes"] - disk["bytes"],
        again.tokens == end and _same(cache, again.cache()),
    )


def _tensors(cache: Any) -> list[torch.Tensor]:
    found = []
    for layer in cache.layers:
        found += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            found += list(states.values())
    return [tensor for tensor in found if tensor is not None]


def _bytes(cache: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(cache))


def _same(one: Any, other: Any) -> bool:
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    main()
