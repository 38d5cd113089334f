"""The closed list of codecs. Numbers are written to disk and mean the same forever.

Most codecs are always there. Those that decode with the numbers of a profile are made from one: "predictive", with a
level "predictive:2" (or 1, 3; exact, from fast to small), and with a quality behind an @, "predictive@0.75" (bits a
value), "predictive@kl0.01" (what the model's predictions may lose, nats a token) and "aqua@2" (or 3, 4). "tsc" needs
none; behind it may stand the tokens from keyframe to keyframe, "tsc@16", and corrections, "tsc@16/0". Those that code
blocks against others (`DeltaCodec`) have numbers of the same list, and no name to ask for: settings choose them
together with another codec. Those of whole sequences (`kvstore.codecs.tokens`, `kvstore.codecs.speculative`), which
need a model to run, have numbers of it, too, and are in no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from weakref import WeakKeyDictionary

from kvstore.codecs.base import Codec
from kvstore.codecs.delta import DeltaCodec
from kvstore.codecs.entropy.codec import EntropyCodec
from kvstore.codecs.group_sections import profile_of_group
from kvstore.codecs.groups import GroupedCodec
from kvstore.codecs.profile import Described, Profile
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.splitzip.codec import SplitZipCodec
from kvstore.codecs.zstd import ZstdCodec
from kvstore.errors import ProfileError, UnknownCodec

_MOST_BITS = 16.0
_KL = "kl"
_LEVELS = (":1", ":2", ":3")
_MOST_DIGITS, _MOST_TOP = 6, 64  # of settings of tsc


@dataclass(frozen=True)
class Family:
    """Codecs of one number that are made from a profile, with a quality behind their name.

    Attributes:
        id, name: as in `Codec`.
        make: makes a codec from the profile and the quality; the quality None makes one that decodes all of them.
        qualities: what may follow the name, for error messages.
        is_quality: whether a text behind the @ is a quality; "" if there is none. A level is with its colon, ":2".
        together: whether several blocks are decoded sooner together than one after the other.

    Example:
        >>> family = REGISTRY.families["aqua"]
        >>> family.id, family.qualities, family.is_quality("3")
        (5, '@2|3|4', True)
    """

    id: int
    name: str
    make: Callable[[Profile, str | None], Codec]
    qualities: str
    is_quality: Callable[[str], bool]
    together: bool = False


@dataclass(frozen=True)
class Tuned:
    """Codecs of one number that need no profile, with settings behind their name.

    Attributes:
        id, name: as in `Codec`.
        make: makes a codec from the text behind the @, "" for what is usual; it decodes what any of them wrote.
        settings: what may follow the name, for error messages.
        is_setting: whether a text behind the @ is one.

    Example:
        >>> tuned = REGISTRY.tuned["tsc"]
        >>> tuned.id, tuned.settings, tuned.is_setting("16/0")
        (6, '[@KAPPA[/TOP]]', True)
    """

    id: int
    name: str
    make: Callable[[str], Codec]
    settings: str
    is_setting: Callable[[str], bool]


@dataclass(frozen=True)
class DeltaKind:
    """Codecs of one number that code blocks against other blocks.

    Attributes:
        id, name: as in `DeltaCodec`.
        make: makes a codec from the profile that a record names; None if the record names none.

    Example:
        >>> REGISTRY.deltas[3].name
        'donor'
    """

    id: int
    name: str
    make: Callable[[Profile | None], DeltaCodec]


@dataclass(frozen=True)
class ArchiveKind:
    """Archives of one number: sequences that only the model itself gives back.

    Attributes:
        id, name: what archives, and their page in docs/codecs, call it.

    Example:
        >>> REGISTRY.archives[8].name
        'tokens'
    """

    id: int
    name: str


class Registry:
    """Codecs of all kinds by number and by name. Immutable and thread-safe.

    Args:
        codecs: those that need no profile.
        families: those made from a profile.
        deltas: those that code against other blocks.
        archives: those of whole sequences.
        tuned: those that need no profile, but have settings.

    Raises:
        ValueError: a number or a name occurs twice, or a number does not fit 16 bits.

    Example:
        >>> registry = Registry([RawCodec()])
        >>> registry.names(), registry.by_id(0).name
        (('raw',), 'raw')
    """

    def __init__(
        self,
        codecs: Iterable[Codec],
        families: Iterable[Family] = (),
        deltas: Iterable[DeltaKind] = (),
        archives: Iterable[ArchiveKind] = (),
        tuned: Iterable[Tuned] = (),
    ) -> None:
        codecs, families, deltas, archives = list(codecs), list(families), list(deltas), list(archives)
        tuned = list(tuned)
        ids, names = set[int](), set[str]()
        every: list[Codec | Family | DeltaKind | ArchiveKind | Tuned] = [*codecs, *families, *deltas, *archives, *tuned]
        for one in every:
            if one.id in ids or one.name in names:
                raise ValueError(f"codec {one.id} ({one.name}): the number or the name is registered already")
            if not 0 <= one.id < 1 << 16:
                raise ValueError(f"codec {one.name}: expected a number from 0 to 65535, found {one.id}")
            ids.add(one.id)
            names.add(one.name)
        self._by_id = {codec.id: codec for codec in codecs}
        self._by_name = {codec.name: codec for codec in codecs}
        self.apart = frozenset(codec.id for codec in codecs if codec.layers_apart)
        self.copying = frozenset(codec.id for codec in codecs if codec.copies)
        self.together = frozenset([family.id for family in families if family.together] + [one.id for one in deltas])
        self.families = {family.name: family for family in families}
        self.deltas = {delta.id: delta for delta in deltas}
        self.archives = {archive.id: archive for archive in archives}
        self.tuned = {one.name: one for one in tuned}
        self.labels = {one.id: one.name for one in every if one.id not in self.archives}

    def by_id(self, number: int) -> Codec:
        """Return the codec with this number, of those that need no profile.

        Raises:
            UnknownCodec: there is none; the message says why.
        """
        if number in self._by_id:
            return self._by_id[number]
        for one in self.tuned.values():
            if one.id == number:
                return _made_tuned(one, "")
        if number in self.deltas:
            raise UnknownCodec(
                f"codec {number} ({self.deltas[number].name}) cannot decode without donors; use delta_by_id"
            )
        if number in self.archives:
            raise UnknownCodec(f"codec {number} ({self.archives[number].name}) is one of archives; no store holds it")
        needs = [family.name for family in self.families.values() if family.id == number]
        if needs:
            raise UnknownCodec(f"codec {number} ({needs[0]}) needs a profile, but the record names none; it is damaged")
        raise UnknownCodec(f"codec {number} is unknown; a newer kvstore may have written it: upgrade to read it")

    def by_name(self, name: str) -> Codec:
        """Return the codec with this name, of those that need no profile.

        Raises:
            UnknownCodec: there is none; the message names those that there are.
        """
        if name not in self._by_name:
            others = [f"{family.name}{family.qualities}" for family in self.families.values()]
            others += [f"{one.name}{one.settings}" for one in self.tuned.values()]
            raise UnknownCodec(f"codec {name!r} is unknown; choose one of {', '.join((*self.names(), *others))}")
        return self._by_name[name]

    def names(self) -> tuple[str, ...]:
        """Return the names of the codecs that need no profile."""
        return tuple(self._by_name)


def codec_by_id(number: int, profile: Profile | None = None) -> Codec:
    """Return a codec that decodes everything that codecs of this number wrote.

    Args:
        number: as records have it.
        profile: the one that a record names; None if it names none.

    Raises:
        UnknownCodec: no codec with this number decodes without donors or without a profile.
        ProfileError: the profile lacks what the codec needs.

    Example:
        >>> codec_by_id(7).name
        'entropy'
    """
    if profile is not None:
        for family in REGISTRY.families.values():
            if family.id == number:
                return _made(family, profile, None)
    return REGISTRY.by_id(number)


def codec_by_name(name: str, profile: Profile | None = None) -> Codec:
    """Return the codec with this name, to encode with. The same name and profile give the same object.

    Args:
        name: such as "entropy", or "predictive@0.75" with a quality.
        profile: for codecs that need one.

    Raises:
        UnknownCodec: there is no such codec; the message names those that there are.
        ProfileError: the codec needs a profile and there is none, or the profile lacks what the codec needs.

    Example:
        >>> codec_by_name("zstd").id
        16
    """
    start, at, quality = name.partition("@")
    tuned = REGISTRY.tuned.get(start)
    if tuned is not None:
        if bool(at) != bool(quality) or (at and not tuned.is_setting(quality)):
            raise UnknownCodec(f"codec {name!r} is unknown; write {tuned.name}{tuned.settings}")
        return _made_tuned(tuned, quality)
    if ":" in start:
        start, colon, level = name.partition(":")
        quality = colon + level
    family = REGISTRY.families.get(start)
    if family is None or (at and quality[:1] in ("", ":")):
        return REGISTRY.by_name(name)
    if not family.is_quality(quality):
        raise UnknownCodec(f"codec {name!r} is unknown; write {family.name}{family.qualities}")
    if profile is None:
        raise ProfileError(
            f"codec {name!r} needs a profile of the model; make one with `kvstore calibrate` and name its file in "
            "StoreConfig.profile"
        )
    return _made(family, profile, quality or None)


def codes_groups(name: str, has_states: bool = False) -> bool:
    """Return whether the codec of this name, if there is one, codes layouts with windows, or with states too.

    Codecs without a profile do, and the exact predictive one where there are no states.

    Example:
        >>> codes_groups("entropy"), codes_groups("predictive:2"), codes_groups("predictive@0.7")
        (True, True, False)
    """
    family = REGISTRY.families.get(name.partition("@")[0].partition(":")[0])
    return family is None or (family.make is _predictive and "@" not in name and not has_states)


def codec_names() -> tuple[str, ...]:
    """Return the names of the codecs that need no profile.

    Example:
        >>> codec_names()
        ('raw', 'splitzip', 'entropy', 'zstd')
    """
    return REGISTRY.names()


def codec_label(number: int) -> str:
    """The name of the codec with this number, without a quality; of an unknown one its number."""
    return REGISTRY.labels.get(number, f"codec {number}")


def may_need_profile(number: int) -> bool:
    """Whether records with this codec number may name a profile, without which they cannot be decoded."""
    return is_delta(number) or any(family.id == number for family in REGISTRY.families.values())


def is_known(number: int) -> bool:
    """Whether this version decodes records with this codec number."""
    return number in REGISTRY.labels


def only_copies(number: int) -> bool:
    """Whether coding with this codec number is no more than copying."""
    return number in REGISTRY.copying


def has_layers_apart(number: int | None) -> bool:
    """Return whether each layer of this codec number is decoded without the others, and without a profile.

    Example:
        >>> has_layers_apart(1), has_layers_apart(2), has_layers_apart(None)
        (True, False, False)
    """
    return number is not None and number in REGISTRY.apart


def gains_together(number: int | None) -> bool:
    """Return whether several blocks of this codec number are decoded sooner together than one after the other.

    Example:
        >>> gains_together(2), gains_together(1), gains_together(None)
        (True, False, False)
    """
    return number is not None and number in REGISTRY.together


def is_delta(number: int) -> bool:
    """Return whether records with this codec number are coded against other blocks (see `DeltaCodec`).

    Example:
        >>> is_delta(3), is_delta(1)
        (True, False)
    """
    return number in REGISTRY.deltas


def delta_by_id(number: int, profile: Profile | None = None) -> DeltaCodec:
    """Return a delta codec that decodes everything that delta codecs of this number wrote.

    Args:
        number: as records have it.
        profile: the one that a record names; None if it names none.

    Raises:
        UnknownCodec: there is no delta codec with this number.
        ProfileError: the profile lacks what the codec needs.
    """
    if number not in REGISTRY.deltas:
        raise UnknownCodec(f"codec {number} does not code against other blocks; use codec_by_id")
    return _plain_delta(number) if profile is None else REGISTRY.deltas[number].make(profile)


def auto_name(profile: Described | None) -> str:
    """Return the name of the exact codec that makes blocks smallest.

    This is "predictive" if the profile has the section "lossless", else "entropy".

    Example:
        >>> auto_name(None)
        'entropy'
    """
    return EntropyCodec.name if profile is None or "lossless" not in profile.sections else "predictive"


# ---- codecs made from profiles ---------------------------------------------------------------------------------------

_lock = Lock()  # guards _all_made
_all_made: WeakKeyDictionary[Profile, dict[tuple[str, str | None], Codec]] = WeakKeyDictionary()


def _made(family: Family, profile: Profile, quality: str | None) -> Codec:
    """One object for all who ask with the same profile: codecs hold models, and what they learned of devices."""
    with _lock:
        made = _all_made.setdefault(profile, {})
        if (family.name, quality) not in made:
            make = _make_grouped if profile.layout.is_grouped else _make
            made[family.name, quality] = make(family, profile, quality)
        return made[family.name, quality]


def _make(family: Family, profile: Profile, quality: str | None) -> Codec:
    return family.make(profile, quality)


def _make_grouped(family: Family, profile: Profile, quality: str | None) -> Codec:
    """Of a profile for a layout with windows: a codec for each group of layers."""
    if family.make is not _predictive or (quality is not None and quality not in _LEVELS):
        raise ProfileError(
            f"{family.name}: layouts with windows are coded without loss alone; use predictive or entropy"
        )
    groups = range(len(profile.layout.groups))
    return GroupedCodec(profile.layout, [family.make(profile_of_group(profile, number), quality) for number in groups])


def _predictive(profile: Profile, quality: str | None) -> Codec:
    from kvstore.codecs.predictive.codec import PredictiveCodec

    if quality is None:
        return PredictiveCodec.from_profile(profile)
    if quality in _LEVELS:
        return PredictiveCodec.from_profile(profile, level=int(quality[1:]))
    number = float(quality.removeprefix(_KL))
    if quality.startswith(_KL):
        return PredictiveCodec.from_profile(profile, kl=number)
    return PredictiveCodec.from_profile(profile, bits=number)


def _is_predictive_quality(text: str) -> bool:
    if text in _LEVELS:
        return True
    try:
        return not text or 0 < float(text.removeprefix(_KL)) < _MOST_BITS
    except ValueError:
        return False


def _aqua(profile: Profile, quality: str | None) -> Codec:
    from kvstore.codecs.aqua.codec import AquaCodec
    from kvstore.codecs.aqua.predictors import AquaPredictors

    predictors = AquaPredictors.from_arrays(profile.layout, profile.section("aqua"))
    return AquaCodec(predictors, 4 if quality is None else int(quality), profile=profile.id)


def _donor(profile: Profile | None) -> DeltaCodec:
    from kvstore.codecs.donor.codec import DonorCodec

    if profile is None:
        return DonorCodec(EntropyCodec())
    plain = codec_by_name(auto_name(profile), profile)
    return DonorCodec.from_profile(plain, profile)


@lru_cache(maxsize=64)
def _made_tuned(tuned: Tuned, setting: str) -> Codec:
    return tuned.make(setting)


def _tsc(setting: str) -> Codec:
    from kvstore.codecs.tsc.codec import TscCodec

    return TscCodec(*map(int, setting.split("/"))) if setting else TscCodec()


def _is_tsc_setting(text: str) -> bool:
    kappa, slash, top = text.partition("/")
    numbers = [kappa, top] if slash else [kappa]
    if not all(number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS for number in numbers):
        return False
    return 2 <= int(kappa) < 1 << 16 and (not slash or int(top) <= _MOST_TOP)


@lru_cache(maxsize=8)
def _plain_delta(number: int) -> DeltaCodec:
    return REGISTRY.deltas[number].make(None)


REGISTRY = Registry(
    [RawCodec(), SplitZipCodec(), EntropyCodec(), ZstdCodec()],
    [
        Family(2, "predictive", _predictive, "[:1|:2|:3|@bits|@klNATS]", _is_predictive_quality, True),
        Family(5, "aqua", _aqua, "@2|3|4", lambda text: text in ("2", "3", "4")),
    ],
    [DeltaKind(3, "donor", _donor)],
    [ArchiveKind(4, "speculative"), ArchiveKind(8, "tokens")],
    [Tuned(6, "tsc", _tsc, "[@KAPPA[/TOP]]", _is_tsc_setting)],
)
