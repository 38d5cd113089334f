"""The closed list of codecs. Numbers are written to disk and mean the same forever.

Most codecs are always there. Those that decode with the numbers of a profile are made from one: "predictive", and with
a quality behind an @, "predictive@0.75" (bits a value), "predictive@kl0.01" (what the model's predictions may lose,
nats a token) and "aqua@2" (or 3, 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from weakref import WeakKeyDictionary

from kvstore.codecs.base import Codec
from kvstore.codecs.entropy import EntropyCodec
from kvstore.codecs.profile import Profile
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.splitzip import SplitZipCodec
from kvstore.codecs.zstd import ZstdCodec
from kvstore.errors import ProfileError, UnknownCodec

_MOST_BITS = 16.0
_KL = "kl"


class Registry:
    """Codecs by number and by name; both are unique."""

    def __init__(self, codecs: Iterable[Codec]) -> None:
        self._by_id: dict[int, Codec] = {}
        self._by_name: dict[str, Codec] = {}
        for codec in codecs:
            if codec.id in self._by_id or codec.name in self._by_name:
                raise ValueError(f"codec {codec.id} ({codec.name}) is registered already")
            if not 0 <= codec.id < 1 << 16:
                raise ValueError(f"codec {codec.name}: number {codec.id} does not fit 16 bits")
            self._by_id[codec.id] = codec
            self._by_name[codec.name] = codec

    def by_id(self, number: int) -> Codec:
        if number not in self._by_id:
            raise UnknownCodec(f"codec {number} is unknown; a newer kvstore may have written it")
        return self._by_id[number]

    def by_name(self, name: str) -> Codec:
        if name not in self._by_name:
            known = ", ".join((*self.names(), *(f"{family}{_QUALITY[family]}" for family in _FAMILIES)))
            raise UnknownCodec(f"codec {name!r} is unknown; known are {known}")
        return self._by_name[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)


_REGISTRY = Registry([RawCodec(), SplitZipCodec(), EntropyCodec(), ZstdCodec()])


def codec_by_id(number: int, profile: Profile | None = None) -> Codec:
    """The codec with this number, able to decode all that codecs of this number wrote.

    profile: the one that a record names, None where it names none. Raises `UnknownCodec`; `ProfileError` for a profile
    that lacks what the codec needs.
    """
    if profile is not None:
        for family_number, make in _FAMILIES.values():
            if family_number == number:
                return _made(make, profile, None)
    return _REGISTRY.by_id(number)


def codec_by_name(name: str, profile: Profile | None = None) -> Codec:
    """The codec with this name, to encode with. profile: for those that need one.

    Raises `UnknownCodec` naming the known ones, `ProfileError` where a profile is needed and missing, or lacks what the
    codec needs.
    """
    family, at, quality = name.partition("@")
    if family not in _FAMILIES or (at and not quality):
        return _REGISTRY.by_name(name)
    if (quality or family == "aqua") and not _is_quality(family, quality):
        raise UnknownCodec(f"codec {name!r} is unknown; known are {family}{_QUALITY[family]}")
    if profile is None:
        raise ProfileError(
            f"codec {name!r} needs a profile of the model: make one with `kvstore calibrate` and name its file "
            "(StoreConfig.profile)"
        )
    return _made(_FAMILIES[family][1], profile, quality or None)


def codec_names() -> tuple[str, ...]:
    """Names of the codecs that need no profile."""
    return _REGISTRY.names()


def auto_name(profile: Profile | None) -> str:
    """The exact codec that makes blocks smallest: predictive where the profile has what that needs, else entropy."""
    return EntropyCodec.name if profile is None or "lossless" not in profile.sections else "predictive"


# ---- codecs made from profiles ---------------------------------------------------------------------------------------

Make = Callable[[Profile, str | None], Codec]


_lock = Lock()
_all_made: WeakKeyDictionary[Profile, dict[tuple[Make, str | None], Codec]] = WeakKeyDictionary()


def _made(make: Make, profile: Profile, quality: str | None) -> Codec:
    """One object for all who ask with the same profile: codecs hold models, and what they learned of devices."""
    with _lock:
        made = _all_made.setdefault(profile, {})
        if (make, quality) not in made:
            codec = make(profile, quality)
            codec.profile = profile.id
            made[make, quality] = codec
        return made[make, quality]


def _predictive(profile: Profile, quality: str | None) -> Codec:
    from kvstore.codecs.predictive import PredictiveCodec

    if quality is None:
        return PredictiveCodec.from_profile(profile)
    number = float(quality.removeprefix(_KL))
    if quality.startswith(_KL):
        return PredictiveCodec.from_profile(profile, kl=number)
    return PredictiveCodec.from_profile(profile, bits=number)


def _aqua(profile: Profile, quality: str | None) -> Codec:
    from kvstore.codecs.aqua import AquaCodec
    from kvstore.codecs.aqua_predictors import AquaPredictors

    predictors = AquaPredictors.from_arrays(profile.layout, profile.section("aqua"))
    return AquaCodec(predictors) if quality is None else AquaCodec(predictors, int(quality))


_FAMILIES: dict[str, tuple[int, Make]] = {"predictive": (2, _predictive), "aqua": (5, _aqua)}
_QUALITY = {"predictive": "[@bits|@klNATS]", "aqua": "@2|3|4"}


def _is_quality(family: str, text: str) -> bool:
    if family == "aqua":
        return text in ("2", "3", "4")
    try:
        return 0 < float(text.removeprefix(_KL)) < _MOST_BITS
    except ValueError:
        return False
