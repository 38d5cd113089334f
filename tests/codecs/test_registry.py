"""Codec numbers mean the same for ever."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from kvstore import KVLayout, ModelIdentity
from kvstore.codecs import Profile, auto_name, codec_by_id, codec_by_name, codec_names, registry
from kvstore.codecs.aqua.codec import AquaCodec
from kvstore.codecs.donor.codec import DonorCodec
from kvstore.codecs.predictive.codec import PredictiveCodec
from kvstore.codecs.raw import RawCodec
from kvstore.codecs.registry import DeltaKind, Registry, delta_by_id, is_delta
from kvstore.codecs.zstd import ZstdCodec
from kvstore.errors import CodecError, ProfileError, UnknownCodec

# Only ever added to: these numbers are on disks.
NUMBERS = {"raw": 0, "splitzip": 1, "entropy": 7, "zstd": 16}
OF_PROFILES = {"predictive": 2, "aqua": 5}
TUNED = {"tsc": 6}
DELTAS = {"donor": 3}
ARCHIVES = {"speculative": 4, "tokens": 8}


def test_every_codec_has_its_number_for_ever() -> None:
    assert {name: codec_by_name(name).id for name in codec_names()} == NUMBERS
    assert {name: family.id for name, family in registry.REGISTRY.families.items()} == OF_PROFILES
    assert {delta.name: number for number, delta in registry.REGISTRY.deltas.items()} == DELTAS
    assert {archive.name: number for number, archive in registry.REGISTRY.archives.items()} == ARCHIVES
    assert {name: tuned.id for name, tuned in registry.REGISTRY.tuned.items()} == TUNED
    classes = (PredictiveCodec, AquaCodec, DonorCodec)
    assert {one.name: one.id for one in classes} == OF_PROFILES | DELTAS


def test_no_number_is_used_twice() -> None:
    numbers = [*NUMBERS.values(), *OF_PROFILES.values(), *DELTAS.values(), *ARCHIVES.values(), *TUNED.values()]
    assert len(set(numbers)) == len(numbers)


def test_a_delta_codec_is_found_by_its_number_alone() -> None:
    assert isinstance(delta_by_id(3), DonorCodec)
    assert delta_by_id(3) is delta_by_id(3)
    assert [is_delta(number) for number in (0, 2, 3, 7)] == [False, False, True, False]
    with pytest.raises(UnknownCodec, match="cannot decode without donors"):
        codec_by_id(3)
    with pytest.raises(UnknownCodec, match="'donor' is unknown"):
        codec_by_name("donor")
    for number in (7, 99):
        with pytest.raises(UnknownCodec, match=f"codec {number} does not code against other blocks"):
            delta_by_id(number)


def test_a_number_of_archives_is_no_codec_of_a_store() -> None:
    with pytest.raises(UnknownCodec, match=r"codec 8 \(tokens\) is one of archives"):
        codec_by_id(8)
    assert not registry.is_known(8)


def test_a_delta_codec_goes_with_the_profile_that_a_record_names() -> None:
    given = profile("other")
    codec = delta_by_id(3, given)
    assert codec.profile == given.id
    assert delta_by_id(3).profile == bytes(16)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_codec_is_found_by_number_and_by_name(name: str) -> None:
    codec = codec_by_name(name)
    assert codec.name == name
    assert codec_by_id(codec.id) is codec


@pytest.mark.parametrize("number", [15, 17, 65535, -1, 1 << 40])
def test_an_unknown_number_is_a_codec_error(number: int) -> None:
    with pytest.raises(UnknownCodec, match=f"codec {number} is unknown; a newer kvstore may have written it"):
        codec_by_id(number)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    families = "predictive[:1|:2|:3|@bits|@klNATS], aqua@2|3|4, tsc[@KAPPA[/TOP]]"
    known = re.escape(f"choose one of raw, splitzip, entropy, zstd, {families}")
    with pytest.raises(UnknownCodec, match=f"'gzip' is unknown; {known}"):
        codec_by_name("gzip")
    assert issubclass(UnknownCodec, CodecError)


@pytest.mark.parametrize("name", ["tsc", "tsc@2", "tsc@65535/64", "tsc@16/0"])
def test_a_codec_with_settings_decodes_whatever_another_one_wrote(name: str) -> None:
    codec = codec_by_name(name)
    assert codec is codec_by_name(name, profile("other"))
    assert (codec.id, codec.exact, codec.profile) == (6, False, bytes(16))
    assert codec_by_id(6) is codec_by_id(6, profile("other")) is codec_by_name("tsc")
    assert not registry.may_need_profile(6)
    assert registry.codes_groups(name, has_states=True)


@pytest.mark.parametrize(
    "setting", ["@", "@1", "@65536", "@16/65", "@16/", "@/8", "@-2", "@2.0", "@²", "@16/0/0", ":2"]
)
def test_a_setting_that_cannot_be_is_refused_with_those_that_can(setting: str) -> None:
    with pytest.raises(
        UnknownCodec, match=re.escape(f"'tsc{setting}' is unknown") + ".*" + re.escape("tsc[@KAPPA[/TOP]]")
    ):
        codec_by_name(f"tsc{setting}")


class _Renamed(RawCodec):
    name = "other"


class _Renumbered(RawCodec):
    id = 5


class _TooHigh(RawCodec):
    id = 1 << 16
    name = "high"


@pytest.mark.parametrize("second", [RawCodec(), _Renamed(), _Renumbered()], ids=["both", "number", "name"])
def test_a_number_or_a_name_that_is_taken_is_refused(second: RawCodec) -> None:
    with pytest.raises(ValueError, match="registered already"):
        Registry([RawCodec(), ZstdCodec(), second])


@pytest.mark.parametrize(("number", "name"), [(0, "new"), (9, "raw"), (2, "new"), (9, "predictive"), (9, "donor")])
def test_numbers_and_names_are_unique_over_all_kinds_of_codecs(number: int, name: str) -> None:
    known = registry.REGISTRY
    codecs, families = [RawCodec()], [known.families["predictive"]]
    delta = DeltaKind(number, name, known.deltas[3].make)
    if name == "donor":
        families = [replace(families[0], name=name)]
    with pytest.raises(ValueError, match="registered already"):
        Registry(codecs, families, [delta])


def test_a_number_that_does_not_fit_the_record_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a number from 0 to 65535"):
        Registry([_TooHigh()])


# ---- codecs of profiles ----------------------------------------------------------------------------------------------

IDENTITY = ModelIdentity("m", "1", "00", "", KVLayout.uniform(1, 1, 4))


def profile(*sections: str) -> Profile:
    """With these sections, in which nothing is that a codec could use."""
    return Profile.new(IDENTITY, {section: {"x": np.zeros(1, np.int8)} for section in sections})


@pytest.mark.parametrize("name", ["predictive", "predictive@0.75", "predictive@kl0.01", "aqua@2"])
def test_without_a_profile_the_error_says_how_to_make_one(name: str) -> None:
    with pytest.raises(
        ProfileError, match=f"codec '{name}' needs a profile .* `kvstore calibrate` .*StoreConfig.profile"
    ):
        codec_by_name(name)


@pytest.mark.parametrize("number", OF_PROFILES.values())
def test_a_number_of_a_profile_s_codec_is_unknown_where_the_record_names_none(number: int) -> None:
    with pytest.raises(UnknownCodec):
        codec_by_id(number)


@pytest.mark.parametrize(
    "name",
    [
        *("aqua", "aqua@", "aqua@1", "aqua@2.0", "predictive@", "predictive@0", "predictive@-1", "predictive@16"),
        *(
            "predictive@nan",
            "predictive@kl",
            "predictive@kl0",
            "predictive@klkl1",
            "predictive@inf",
            "predictive@a",
            "predictive@1@2",
            *("predictive:", "predictive:0", "predictive:4", "predictive:2@0.5", "predictive@:2", "aqua:2"),
            "raw@1",
            "@",
            "Predictive",
        ),
    ],
)
def test_a_quality_that_there_is_not_is_an_unknown_codec(name: str) -> None:
    with pytest.raises(UnknownCodec, match=re.escape(f"codec {name!r} is unknown")):
        codec_by_name(name, profile("lossless", "aqua"))


@pytest.mark.parametrize("name", ["predictive", "aqua@2"])
def test_a_profile_that_lacks_the_codec_s_part_is_refused(name: str) -> None:
    with pytest.raises(ProfileError):
        codec_by_name(name, profile("other"))
    with pytest.raises(ProfileError):
        codec_by_id(OF_PROFILES[name.partition("@")[0]], profile("other"))


def test_other_numbers_are_the_same_with_a_profile() -> None:
    assert codec_by_id(7, profile("aqua")) is codec_by_id(7)


def test_auto_follows_the_profile() -> None:
    found = [auto_name(x) for x in (None, profile("aqua", "lossy"), profile("lossless"))]
    assert found == ["entropy", "entropy", "predictive"]
