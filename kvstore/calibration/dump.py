"""What a model leaves in its cache for windows of text, in files, for fits that look at it layer by layer.

A work folder:
    dump.json           what it was made from; another model, text, or size starts it anew
    first.npy           `first_layer`
    embedding.npy       the embedding of every token, `[vocabulary, hidden]`
    values.npy          what an error in V costs, `[layers, heads, dim, dim]`
    00000.npy ...       of every window: query energies and norms, `[layers, heads * dim + 1]`
    00000.kv ...        of every window: the tokens (int64), then K and V of every layer, `[tokens, heads * dim]`
Each file is written whole or not at all, a window's .kv last, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.codecs.predictive.linear_model import rotates
from kvstore.codecs.words import FLOAT8, words_of
from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.rope import check_length, in_pairs, regime_of
from kvstore.errors import ConfigError, ProfileError
from kvstore.tiers.disk.fs import FileSystem, read_file, write_file

if TYPE_CHECKING:
    import torch

Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Progress = Callable[[str, int, int], None]
"""(what is being done, how many of it are done, how many there are)"""

VERSION = 1
MIN_LENGTH = 8
HELD_OUT = 8  # one window of so many is kept for the report
_CHARACTERS = 8  # of a token, rather too many
_JSON_LIMIT = 1 << 24
_ROUND = 0x7FFF


def silent(_what: str, _done: int, _total: int) -> None:
    """A `Progress` that tells nobody."""


def floats(bits: Bits) -> Floats:
    """bf16 bits as float32 numbers, of the same shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def nearest_bits(numbers: Floats) -> Bits:
    """The bits of the nearest bf16 values, of finite numbers."""
    words = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((words + _ROUND + ((words >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class KVDump:
    """A finished work folder. Reads map files and keep nothing in memory; thread-safe.

    layout: of what is in the files: the words of the model's values (codecs/words.py), which are bf16; values that are
    not have the dtype that `dtype` says: that of the model, or a float8 that its bf16 values were rounded to. Layers
    with windows stand there with all tokens.
    windows: how many there are, each `length` tokens prefilled at once from position 0. limit: of the windows to fit
    only the first so many are to be used (see `first`). group: numbers of the layers of `layout` in `whole`, the layout
    of what is in the files; None where it is that (see `groups`).
    """

    folder: Path
    layout: KVLayout
    windows: int
    length: int
    limit: int | None = None
    dtype: str = "bfloat16"
    group: tuple[int, ...] | None = None
    whole: KVLayout | None = None

    @classmethod
    def of(cls, folder: Path, layout: KVLayout, windows: int, length: int) -> KVDump:
        """layout: of the model's caches."""
        return cls(folder, replace(layout, dtype="bfloat16"), windows, length, dtype=layout.dtype)

    @classmethod
    def open(cls, folder: Path) -> KVDump:
        """A folder that `make` has finished. Raises `ProfileError` for any other."""
        facts = _facts(FileSystem(), folder)
        if facts is None:
            raise ProfileError(f"{folder}: there is no dump of a model here; run `kvstore calibrate`")
        layout = KVLayout.from_canonical(facts["identity"]["layout"])
        dump = cls.of(folder, layout, facts["windows"], facts["length"])
        missing = [w for w in range(dump.windows) if not dump._has(FileSystem(), w)]
        if missing:
            raise ProfileError(
                f"{folder}: {len(missing)} of {dump.windows} windows are missing; run `kvstore calibrate` again"
            )
        return dump

    @classmethod
    def make(
        cls,
        model: Any,
        tokenizer: Any,
        text: str,
        folder: Path,
        *,
        windows: int = 64,
        length: int = 1024,
        identity: ModelIdentity | None = None,
        progress: Progress = silent,
    ) -> KVDump:
        """Runs the model over the first `windows` windows of `length` tokens of the text, fewer where it is shorter.

        model: a transformers model like Llama, with latents or with windows, in bfloat16, float32 or float16. identity:
        of its caches; if they are of float8, values are rounded to the nearest ones, at most the largest. Continues
        what was begun in `folder` with the same model, text and numbers; anything else that is there from an earlier
        run is removed, which `progress` is told.
        Raises `UnsupportedModel` naming what the model lacks, `UnsupportedLength` where keys depend on the length and
        those of windows of this one are not the identity's, `ConfigError` for a text of less than two windows.
        """
        from kvstore.calibration.probes import probe_of

        identity = identity or ModelIdentity.from_transformers(model, tokenizer)
        check_length(identity.layout, length)
        probe = probe_of(model, regime_of(identity.layout))
        ids = _windows(tokenizer, text, windows, length)
        dump, fs = cls.of(folder, identity.layout, len(ids), length), FileSystem()
        facts = {
            "version": VERSION,
            "identity": identity.fields(),
            "text": hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
            "windows": len(ids),
            "length": length,
        }
        fs.mkdir(str(folder))
        if _facts(fs, folder) != facts:
            if dump._clear(fs):
                progress("another model, text or size: starting anew", 0, 0)
            _save(fs, dump._path("first.npy"), probe.first_layer())
            _save(fs, dump._path("embedding.npy"), probe.embedding())
            _save(fs, dump._path("values.npy"), probe.value_costs())
            write_file(fs, dump._path("dump.json"), json.dumps(facts).encode())
        for window, tokens in enumerate(ids):
            progress("running the model", window, len(ids))
            if not dump._has(fs, window):
                dump._run(fs, probe, window, tokens)
        progress("running the model", len(ids), len(ids))
        return dump

    # ---- windows -------------------------------------------------------------------------------------------------

    @property
    def coded_layout(self) -> KVLayout:
        """Of what `tensors` gives: of words, or of float8."""
        return replace(self.layout, dtype=self.dtype) if self.dtype in FLOAT8 else self.layout

    @property
    def fit_windows(self) -> range:
        """The windows to fit to."""
        count = self.windows - len(self.held_out)
        return range(count if self.limit is None else min(count, self.limit))

    @property
    def held_out(self) -> range:
        """The windows to report on, at the end of the text: an eighth, at least one."""
        return range(self.windows - max(1, self.windows // HELD_OUT), self.windows)

    def first(self, count: int) -> KVDump:
        """The same with only the first `count` windows to fit to; those to report on stay."""
        return replace(self, limit=count)

    def tokens(self, window: int) -> npt.NDArray[np.int64]:
        """`[length]`."""
        return np.fromfile(self._path(f"{window:05d}.kv"), "<i8", self.length)

    def layer(self, layer: int, window: int) -> tuple[Bits, Bits]:
        """K, as cached (after the rotary embedding), and V: words `[length, heads * dim]`, mapped read-only."""
        layers = (self.whole or self.layout).layers
        layer = layer if self.group is None else self.group[layer]
        widths, shape = [x.heads * (x.key_dim + x.value_dim) for x in layers], layers[layer]
        begin = 8 * self.length + 2 * self.length * sum(widths[:layer])
        return (
            self._map(window, begin, shape.heads * shape.key_dim),
            self._map(window, begin + 2 * self.length * shape.heads * shape.key_dim, shape.heads * shape.value_dim),
        )

    def coded(self, layer: int, window: int) -> tuple[Bits, Bits]:
        """`layer`, with K in the order that the codecs' integers work in, `rope.pair_order`."""
        keys, values = self.layer(layer, window)
        if not rotates(self.layout):
            return keys, values
        return in_pairs(keys, self.layout.rope, self.layout.layers[layer].key_dim), values

    def tensors(self, window: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of every layer, as cached: bfloat16, or float8 if they are, `[heads, length, dim]`, copies."""
        import torch

        found = []
        for number, shape in enumerate(self.layout.layers):
            k, v = (
                torch.from_numpy(np.array(bits)).view(torch.bfloat16).view(len(bits), shape.heads, -1).transpose(0, 1)
                for bits in self.layer(number, window)
            )
            if self.dtype in FLOAT8:
                k, v = (x.to(getattr(torch, self.dtype)) for x in (k, v))
            found.append((k, v))
        return found

    def groups(self) -> list[KVDump]:
        """The same for each group of layers that a codec takes as a block of its own; itself alone without windows."""
        if not self.layout.is_grouped:
            return [self]
        found = self.layout.groups
        return [replace(self, layout=one.layout, group=one.layers, whole=self.layout) for one in found]

    def some(self, count: int) -> list[int]:
        """So many of the windows to fit to, or all, evenly spread."""
        windows = list(self.fit_windows)
        return windows[:: max(1, len(windows) // count)][:count]

    # ---- the model -----------------------------------------------------------------------------------------------

    @cached_property
    def first_layer(self) -> Bits:
        """What the first layer's cache holds of every token, by the weights alone: bf16 bits of K before the rotation,
        with the factor of the rotary embedding and in `rope.pair_order`, then of V, `[vocabulary, heads * key_dim +
        heads * value_dim]`; mapped. Only of groups with that layer."""
        return self._load("first.npy")

    @cached_property
    def embedding(self) -> Bits:
        """bf16 bits `[vocabulary, hidden]`; mapped."""
        return self._load("embedding.npy")

    @cached_property
    def sensitivity_k(self) -> Floats:
        """RMS change of an attention logit by an error of one in K, of each rotary pair: `[layers, heads * dim]`, in
        `rope.pair_order`."""
        shape = self.layout.layers[0]
        energy = self._means[:, :-1].reshape(-1, shape.heads, 2, shape.key_dim // 2).mean(2)
        cost = np.sqrt(np.concatenate([energy, energy], 2)) / math.sqrt(shape.key_dim)
        found: Floats = np.maximum(cost, 1e-4).reshape(len(energy), -1).astype(np.float32)
        return found

    @cached_property
    def sensitivity_v(self) -> Floats:
        """`[layers, heads, dim, dim]`: lower Cholesky factor of the Gram matrix of the output projection, mean over the
        query heads of each key/value head. An error e in V changes the layer's output by |e @ factor|."""
        found: Floats = np.load(self._path("values.npy"))
        return found

    @cached_property
    def norm(self) -> Floats:
        """`[layers]`: RMS norm of the residual stream behind each layer."""
        found: Floats = self._means[:, -1].astype(np.float32)
        return found

    @cached_property
    def _means(self) -> npt.NDArray[np.float64]:
        """`[layers, heads * dim + 1]`: means over the windows to fit of what each window gave."""
        rows = [np.load(self._path(f"{window:05d}.npy")) for window in self.fit_windows]
        found: npt.NDArray[np.float64] = np.mean(rows, axis=0)
        return found

    # ---- files ---------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Removes the files of this dump, and its folder if nothing else is in it."""
        self._clear(FileSystem())
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _run(self, fs: FileSystem, probe: Any, window: int, tokens: npt.NDArray[np.int64]) -> None:
        layers, statistics = probe.run(tokens)
        if window == 0:
            self._check_first_layer(tokens, *layers[0])
        _save(fs, self._path(f"{window:05d}.npy"), statistics)
        parts = [tokens.astype("<i8").tobytes(), *(self._kept(part).tobytes() for pair in layers for part in pair)]
        write_file(fs, self._path(f"{window:05d}.kv"), b"".join(parts))

    def _kept(self, part: Bits) -> Bits:
        """Of bf16 values, where caches are of float8, the words of what they are rounded to."""
        if self.dtype not in FLOAT8:
            return part
        import torch

        dtype = getattr(torch, self.dtype)
        most = torch.finfo(dtype).max
        return words_of(torch.from_numpy(floats(part)).clamp(-most, most).to(dtype))

    def _check_first_layer(self, tokens: npt.NDArray[np.int64], keys: Bits, values: Bits) -> None:
        """Whether what is not rotated of the first layer, its values or its latents, is what its weights alone say:
        nothing was added before it."""
        from kvstore.errors import UnsupportedModel

        columns = slice(0, keys.shape[1]) if self.layout.is_latent else slice(keys.shape[1], None)
        said, found = floats(self.first_layer[tokens, columns]), floats(keys if self.layout.is_latent else values)
        if not np.square(said - found).mean() <= 1e-3 * np.square(found).mean():
            raise UnsupportedModel("calibration needs a model whose first layer gets the embedding of the token alone")

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _has(self, fs: FileSystem, window: int) -> bool:
        want = self.length * (8 + self.layout.bytes_per_token)
        try:
            return fs.size(self._path(f"{window:05d}.kv")) == want and fs.size(self._path(f"{window:05d}.npy")) > 0
        except OSError:
            return False

    def _map(self, window: int, offset: int, width: int) -> Bits:
        return np.memmap(self._path(f"{window:05d}.kv"), "<u2", "r", offset, (self.length, width))

    def _load(self, name: str) -> Bits:
        found: Bits = np.load(self._path(name), mmap_mode="r")
        return found

    def _clear(self, fs: FileSystem) -> bool:
        """Removes the files of any dump in the folder, dump.json first; whether there were any."""
        mine = [name for name in fs.names(str(self.folder)) if _is_mine(name)]
        for name in sorted(mine, key=lambda name: name != "dump.json"):
            fs.unlink(self._path(name))
        return bool(mine)


def check_sizes(windows: int, length: int) -> None:
    """Raises `ConfigError` for fewer windows or tokens than can be fitted to."""
    if windows < 2:
        raise ConfigError(f"windows: expected at least 2, of which one is kept for the report, found {windows}")
    if length < MIN_LENGTH:
        raise ConfigError(f"length: expected at least {MIN_LENGTH} tokens, found {length}")


def _is_mine(name: str) -> bool:
    stem, _, kind = name.removesuffix(".new").partition(".")
    named = name.removesuffix(".new") in ("dump.json", "first.npy", "embedding.npy", "values.npy")
    return named or (kind in ("npy", "kv") and len(stem) >= 5 and stem.isdecimal())


def _facts(fs: FileSystem, folder: Path) -> dict[str, Any] | None:
    """What the dump in the folder was made from; None where there is none that can be read."""
    try:
        facts = json.loads(read_file(fs, os.path.join(folder, "dump.json"), _JSON_LIMIT))
        return facts if facts["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _windows(tokenizer: Any, text: str, windows: int, length: int) -> npt.NDArray[np.int64]:
    """`[windows, length]` tokens of the text."""
    check_sizes(windows, length)
    ids = tokenizer(text[: windows * length * _CHARACTERS], verbose=False).input_ids
    count = min(windows, len(ids) // length)
    if count < 2:
        raise ConfigError(f"text: {len(ids)} tokens are less than two windows of {length}; give more text")
    return np.asarray(ids[: count * length], np.int64).reshape(count, length)


def _save(fs: FileSystem, path: str, array: npt.NDArray[Any]) -> None:
    file = io.BytesIO()
    np.save(file, array)
    write_file(fs, path, file.getbuffer())
