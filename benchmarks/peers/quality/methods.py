"""The ways to code a cache with loss, behind one interface; and those of this project behind it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.peers.quality import cachegen, kvtc
from benchmarks.peers.quality.clock import Clock
from benchmarks.peers.quality.data import MemoryDump, Pairs, calibration_text, cut
from benchmarks.peers.quality.nvfp4 import Nvfp4
from benchmarks.profile import PARTS, profile_path
from kvstore.calibration.aqua.fit import fit
from kvstore.codecs import BlockInfo, Codec, KVView, codec_by_name
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.profile import Profile
from kvstore.codecs.tsc.codec import TscCodec
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.rope import can_code_moved
from kvstore.write.recent import RECENT_CODEC

LOSSY = "predictive/lossy@"  # and bits a value
RECENT = "predictive/recent@"  # the same, the last blocks exact
RUNGS = (0.25, 0.32, 0.42, 0.55, 0.7, 0.95, 1.1)
RECENT_RUNGS = (0.32, 0.7)
TSC = ((64, 8), (64, 0), (16, 8), (8, 8))  # tokens from keyframe to keyframe, corrections in 256 values
KVTC_BITS = (0.5, 1, 1.5, 2, 3)  # of a value, before the entropy coder
BLOCK = 64  # tokens of a block, as the store cuts them
RECENT_TOKENS = 128  # `StoreConfig.exact_recent_tokens`
FITTED = Path("build/peers")  # what peers fit, which takes minutes


class Method(Protocol):
    """decoding: of that part of `code`; zero where it is not told apart."""

    decoding: Clock

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        """Codes and decodes.

        tokens: int64 `[n]`; pairs: K and V of each layer, bfloat16 `[heads, n, dim]`, not mutated; start: position of
        the first. Returns the decoded pairs and the bytes of everything that the decoder needs, but what is fitted
        beforehand.
        """


class StoreMethod:
    """A codec of the project, on blocks as the store cuts them, unless `block` says otherwise (tokens)."""

    def __init__(self, codec: Codec, layout: KVLayout, block: int = BLOCK) -> None:
        self._codec, self._layout, self._block = codec, layout, block
        self.decoding = Clock()

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        decoded = [(torch.empty_like(k), torch.empty_like(v)) for k, v in pairs]
        source, target = KVView.of_layers(self._layout, pairs), KVView.of_layers(self._layout, decoded)
        total = 0
        for begin in range(0, len(tokens), self._block):
            ids = tokens[begin : begin + self._block].numpy().astype(np.uint32)
            info = BlockInfo(self._layout, ids, start + begin)
            memory = memoryview(bytearray(self._codec.bound(info)))
            sizes = self._codec.encode(info, source.narrow(begin, len(ids)), memory)
            assert sizes is not None, "a buffer of the codec's bound was too small"
            payload = memory[: sum(sizes)].toreadonly()
            with self.decoding:
                self._codec.decode(info, payload, sizes, target.narrow(begin, len(ids)))
            total += len(payload)
        return decoded, total


class RecentMethod:
    """Another method, with the last tokens of all that is given kept exact, as a store does with
    `exact_recent_tokens`: in blocks, by the codec that it has for them."""

    def __init__(self, method: Method, layout: KVLayout) -> None:
        self._method, self._exact = method, StoreMethod(RECENT_CODEC, layout)
        self.decoding = Clock()

    def code(self, tokens: torch.Tensor, pairs: Pairs, start: int) -> tuple[Pairs, int]:
        at = max(0, (len(tokens) - RECENT_TOKENS) // BLOCK * BLOCK)
        old, old_bytes = self._method.code(tokens[:at], [(k[:, :at], v[:, :at]) for k, v in pairs], start)
        new, new_bytes = self._exact.code(tokens[at:], [(k[:, at:], v[:, at:]) for k, v in pairs], start + at)
        both = [
            (torch.cat([k, k_new], dim=1), torch.cat([v, v_new], dim=1))
            for (k, v), (k_new, v_new) in zip(old, new, strict=True)
        ]
        return both, old_bytes + new_bytes


@dataclass
class Context:
    """What methods are made of: the model, its layout, and text to calibrate with."""

    model: Any
    tokenizer: Any
    layout: KVLayout
    text: Path | None
    calibration_text: Path | None
    windows: int
    given: Path | None = None
    """A profile for predictive coding; None: made with the calibration text, and kept in build/."""

    @cached_property
    def profile(self) -> Profile:
        text = None
        if self.text or self.calibration_text:
            text = calibration_text(self.text, self.calibration_text, self.windows)
        parts = PARTS if self.layout.is_uniform and can_code_moved(self.layout) else ("lossless", "lossy")
        path = profile_path(self.model, self.tokenizer, self.given, self.windows, text, parts)
        return Profile.load(path, ModelIdentity.from_transformers(self.model, self.tokenizer))

    @cached_property
    def dump(self) -> MemoryDump:
        """Caches of the windows that the profile was fitted to, so that all methods see the same; made on first use."""
        return MemoryDump(self.model, self.layout, self._tokens)

    def fitted(self, peer: Any) -> dict[str, Any]:
        """What the module `peer` fits to `dump`, arrays by name, kept in build/."""
        path = self.fitted_path(peer)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"partial-{path.name}")
            np.savez(partial, **peer.fit(self.dump))
            partial.rename(path)
        with np.load(path) as found:
            return dict(found)

    def fitted_path(self, peer: Any) -> Path:
        """Of another name for another model, other windows, or another way to fit."""
        identity = ModelIdentity.from_transformers(self.model, self.tokenizer)
        key = hashlib.sha256(identity.digest + self._tokens.numpy().tobytes() + inspect.getsource(peer.fit).encode())
        return FITTED / f"{peer.__name__.rpartition('.')[2]}-{key.hexdigest()[:16]}.npz"

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """Of the windows to fit to, `[windows, 1024]`."""
        windows = self.profile.report["windows"]
        total = windows["fit"] + windows["held_out"]
        text = calibration_text(self.text, self.calibration_text, total)
        return cut(self.tokenizer, text, total)[: windows["fit"]]


def _aqua(bits: int, context: Context) -> Method:
    return StoreMethod(AquaCodec(fit(context.dump, bits), bits), context.layout)


def _plain(backbone: str, bits: int, context: Context) -> Method:
    return StoreMethod(AquaCodec(None, bits, backbone), context.layout)


def _tsc(kappa: int, top: int, context: Context) -> Method:
    return StoreMethod(TscCodec(kappa, top), context.layout)


def _predictive(bits: float, context: Context) -> Method:
    return StoreMethod(codec_by_name(f"predictive@{bits}", context.profile), context.layout)


def _recent(bits: float, context: Context) -> Method:
    return RecentMethod(_predictive(bits, context), context.layout)


def _kvtc(bits: float, context: Context) -> Method:
    return kvtc.Kvtc(context.fitted(kvtc), context.layout, bits)


def _kvtc_recent(bits: float, context: Context) -> Method:
    return RecentMethod(_kvtc(bits, context), context.layout)


def _cachegen(level: float, context: Context) -> Method:
    return cachegen.CacheGen(context.fitted(cachegen), context.layout, level)


def _nvfp4(context: Context) -> Method:
    return Nvfp4()


def _peer(name: str, library: str, bits: int, context: Context) -> Method | None:
    try:
        if find_spec(library) is None:
            return None
    except ModuleNotFoundError:  # of a package in a namespace that is not there
        return None
    made: Method = import_module(f"benchmarks.peers.quality.{name}").make(bits)
    return made


# Makers by name; they give None where a library is not installed.
CASES: dict[str, Callable[[Context], Method | None]] = {
    **{f"{LOSSY}{bits}": partial(_predictive, bits) for bits in RUNGS},
    **{f"{RECENT}{bits}": partial(_recent, bits) for bits in RECENT_RUNGS},
    **{f"aqua/{bits}bit": partial(_aqua, bits) for bits in (2, 3, 4)},
    **{f"{name}/{bits}bit": partial(_plain, name, bits) for name in ("higgs", "rtn") for bits in (2, 3, 4)},
    **{f"tsc/top{top}/{kappa}": partial(_tsc, kappa, top) for kappa, top in TSC},
    **{f"quanto/{bits}bit": partial(_peer, "quanto", "optimum.quanto", bits) for bits in (4, 2)},
    **{f"hqq/{bits}bit": partial(_peer, "hqq", "hqq", bits) for bits in (4, 2)},
    **{f"turboquant/{bits}bit": partial(_peer, "turboquant", "turboquant", bits) for bits in (2, 3, 4)},
    **{f"kvtc/{bits}bit": partial(_kvtc, bits) for bits in KVTC_BITS},
    **{f"kvtc-recent/{bits}bit": partial(_kvtc_recent, bits) for bits in (0.5, 1)},
    **{f"cachegen/{level}": partial(_cachegen, level) for level in cachegen.LEVELS},
    "nvfp4": _nvfp4,
}
