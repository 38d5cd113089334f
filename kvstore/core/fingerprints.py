"""The text of a fingerprint of weights: what made it, and its parts."""

from __future__ import annotations

SAMPLED = "sampled-sha256:"
"""Begins the fingerprints that `ModelIdentity.from_transformers` makes; others are a caller's own, in one part."""
MORE = ";"
"""Between the parts: the weights, then "config:", "rows:" and "adapters:". The first stores have the weights alone, and
later ones no rows."""


def differing_parts(stored: str, given: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the parts ("weights", "config", "rows", "adapters") in which two fingerprints differ: stored, given.

    A fingerprint of the first stores says little of the config and nothing of adapters. It is taken for that of a model
    with the same weights, the given config and no active adapters. One that says nothing of rows is taken for that of a
    model with the given ones.

    Example:
        >>> differing_parts("sampled-sha256:1;config:2", "sampled-sha256:1;config:2;adapters:3")
        {'adapters': (None, '3')}
        >>> differing_parts("sampled-sha256:1", "sampled-sha256:1;config:2;rows:4")
        {}
    """
    one, other = _parts(stored), _parts(given)
    if stored.startswith(SAMPLED) and MORE not in stored and "config" in other:
        one["config"] = other["config"]
    if stored.startswith(SAMPLED) and "rows" not in one and "rows" in other:
        one["rows"] = other["rows"]
    names = list({**one, **other})
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _parts(text: str) -> dict[str, str]:
    if not text.startswith(SAMPLED):
        return {"weights": text}
    weights, *rest = text.split(MORE)
    return {"weights": weights} | {part.partition(":")[0]: part.partition(":")[2] for part in rest}
