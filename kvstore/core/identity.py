"""Who made a cache: everything that changes its contents is part of every key."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvstore.core.arguments import check_kind
from kvstore.core.fingerprints import differing_parts
from kvstore.core.keys import hash_fields
from kvstore.core.layout import KVLayout
from kvstore.errors import ConfigError


@dataclass(frozen=True)
class ModelIdentity:
    """The model whose caches a store holds. A store refuses to open for another model: see `difference`.

    Attributes:
        model, revision: names, as the user knows them. They are labels, unless `weights` is "".
        weights: fingerprint of the weights; "" if there is none, so that only the names tell models apart.
        tokenizer: fingerprint of the tokenizer, "" if tokens are made elsewhere.
        layout: shapes, dtype and positions of the caches.
        codec_family: "exact", or the name of a lossy family, whose caches must not mix with exact ones.
        shard: "rank/size" of tensor-parallel parts.

    Raises:
        ConfigError: names the field that has the wrong type.

    Example:
        >>> identity = ModelIdentity("my-model", "main", "weights-1", "", KVLayout.uniform(2, 4, 16))
        >>> other = ModelIdentity("my-model", "main", "weights-2", "", KVLayout.uniform(2, 4, 16))
        >>> identity.difference(other.fields())
        "weights: stored 'weights-2', given 'weights-1'"
    """

    model: str
    revision: str
    weights: str
    tokenizer: str
    layout: KVLayout
    codec_family: str = "exact"
    shard: str = "0/1"

    def __post_init__(self) -> None:
        for name in ("model", "revision", "weights", "tokenizer", "codec_family", "shard"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"ModelIdentity.{name}: expected text, found {getattr(self, name)!r}")
        if not isinstance(self.layout, KVLayout):
            raise ConfigError(f"ModelIdentity.layout: expected a KVLayout, found {self.layout!r}")

    @classmethod
    def from_transformers(
        cls, model: Any, tokenizer: Any = None, revision: str = "", regime: str = "short"
    ) -> ModelIdentity:
        """Make the identity of a loaded transformers model as it is now.

        The layout comes from the model's config. The fingerprint of the weights is a hash over a sample of every
        tensor: another checkpoint never has the same one, an edit of single values may. Beside it stand hashes over
        the config's fields and over the adapters that are active (of peft or transformers): call this again after
        other adapters were activated, merged or disabled.

        Args:
            model: a loaded transformers model.
            tokenizer: its tokenizer, or None if tokens are made elsewhere.
            revision: the checkpoint's version; "" takes the commit that the model was loaded from.
            regime: counts for models with rope type longrope, whose keys depend on the length of the sequence that they
                were computed in. "short": caches of sequences up to the length that the model was first trained on;
                "long": of longer ones, computed as a whole. These are two identities, for two stores. Rope type
                dynamic has "short" alone.

        Raises:
            ConfigError: another `regime`, or model or tokenizer are not loaded ones.
            UnsupportedModel: names what the model keeps that cannot be stored, an adapter whose caches do not follow
                from token ids, or that its weights are not loaded.
        """
        from kvstore.integrations.transformers.describe import identity_fields

        return cls(**identity_fields(model, tokenizer, revision, regime))

    def fields(self) -> dict[str, str]:
        """Every field as text, the layout in canonical form."""
        texts = {x.name: getattr(self, x.name) for x in dataclasses.fields(self) if x.name != "layout"}
        return {**texts, "layout": self.layout.canonical()}

    @cached_property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 over all fields, each with its name and length."""
        return digest_of(self.fields())

    def difference(self, other: dict[str, str]) -> str:
        """Name the fields in which the stored fields `other` are of another model, for an error message; "" for none.

        What counts is the content. The names of model and revision may differ if both sides have a fingerprint of the
        weights. A tokenizer that one side does not name may be any. Layouts are compared field by field.
        """
        mine = self.fields()
        own = mine.pop("layout")
        for label in ("model", "revision") if self.weights and other.get("weights") else ():
            del mine[label]
        if not (self.tokenizer and other.get("tokenizer")):
            del mine["tokenizer"]
        differ = {k: (other.get(k), v) for k, v in mine.items() if k != "weights" and other.get(k) != v}
        pairs = {**differ, **differing_parts(other.get("weights", ""), self.weights)}
        rows = [f"{name}: stored {stored!r}, given {given!r}" for name, (stored, given) in pairs.items()]
        if other.get("layout") != own:
            rows = [*_layout_rows(other.get("layout"), self.layout), *rows]
        return "; ".join(row if len(row) < 300 else row[:300] + "..." for row in rows)


def layout_difference(stored: KVLayout, given: KVLayout) -> str:
    """Name the fields in which two layouts differ, for an error message; "" for none.

    Example:
        >>> layout_difference(KVLayout.uniform(2, 3, 64, "bfloat16"), KVLayout.uniform(2, 4, 64, "float32"))
        'layout.dtype: stored bfloat16, given float32; layout.layers[0].heads: stored 3, given 4 (2 layers differ)'
    """
    rows = [*_differing("layout", stored, given, "dtype"), *_layer_rows(stored, given), *_rope_rows(stored, given)]
    rows += _differing("layout", stored, given, "places", "model_layers", "states", "media", "indexed")
    return "; ".join(rows)


def _layout_rows(stored: str | None, given: KVLayout) -> list[str]:
    try:
        return layout_difference(KVLayout.from_canonical(stored or ""), given).split("; ")
    except ConfigError:
        return [f"layout: stored {stored!r}, given {given.canonical()!r}"]


def _layer_rows(stored: KVLayout, given: KVLayout) -> list[str]:
    """How many layers there are, if not as many; else in what the first differs that does."""
    if len(stored.layers) != len(given.layers):
        return [f"layout.layers: stored {len(stored.layers)} of them, given {len(given.layers)}"]
    pairs = enumerate(zip(stored.layers, given.layers, strict=True))
    differ = [(number, one, other) for number, (one, other) in pairs if one != other]
    if not differ:
        return []
    number, stored_layer, given_layer = differ[0]
    names = "heads", "key_dim", "value_dim", "kind", "window"
    rows = _differing(f"layout.layers[{number}]", stored_layer, given_layer, *names)
    return [*rows[:-1], rows[-1] + (f" ({len(differ)} layers differ)" if len(differ) > 1 else "")]


def _rope_rows(stored: KVLayout, given: KVLayout) -> list[str]:
    """Which rotary parameters differ, if both sides have some."""
    try:
        one, other = dict(json.loads(stored.rope)), dict(json.loads(given.rope))
    except (ValueError, TypeError, RecursionError):
        return _differing("layout", stored, given, "rope")
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    rows = [f"layout.rope.{name}: stored {one.get(name)}, given {other.get(name)}" for name in names]
    return rows or _differing("layout", stored, given, "rope")


def _differing(where: str, stored: Any, given: Any, *names: str) -> list[str]:
    pairs = [(name, getattr(stored, name), getattr(given, name)) for name in names]
    return [f"{where}.{name}: stored {one}, given {other}" for name, one, other in pairs if one != other]


def as_identity(given: Any) -> ModelIdentity:
    """Return what a store is opened for, if it is an identity.

    Raises:
        ConfigError: it is something else; the message says how to make one.
    """
    how = (
        "make one with ModelIdentity.from_transformers(model, tokenizer), or as docs/quickstart.md does without a model"
    )
    check_kind("identity", given, ModelIdentity, how)
    identity: ModelIdentity = given
    return identity


def digest_of(fields: dict[str, str]) -> bytes:
    """Return 32 bytes: SHA-256 over the fields of an identity, each with its name and length (FORMAT.md)."""
    return hash_fields(*(part.encode() for pair in sorted(fields.items()) for part in pair))
