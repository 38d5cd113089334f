"""The head of GGUF files against the package `gguf`, and the identities that follow from it."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import seeds
from llamas import write_gguf

from kvstore.core.identity import ModelIdentity
from kvstore.core.layout import KVLayout
from kvstore.core.rope import can_move
from kvstore.errors import ConfigError, KVStoreError, UnsupportedModel
from kvstore.integrations.llama_cpp.form import StateForm
from kvstore.integrations.llama_cpp.gguf import read_head
from kvstore.integrations.llama_cpp.identity import identity_from_gguf


def test_the_head_is_what_the_package_reads(gguf_path: Path) -> None:
    reader, head = gguf.GGUFReader(gguf_path), read_head(gguf_path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    ours = dict(head.metadata)
    for key, value in theirs.items():
        texts = isinstance(value, list) and isinstance(value[0], str)
        assert ours.pop(key) == ("" if texts else value), key
    assert not ours
    assert head.tensors == {tensor.name: len(tensor.shape) for tensor in reader.tensors}


def test_an_identity_names_layout_and_form(gguf_path: Path) -> None:
    identity = identity_from_gguf(gguf_path)
    rope = '{"rope_theta": 10000.0, "rope_type": "default"}'
    assert identity.layout == KVLayout.uniform(3, 2, 32, "float16", rope)
    assert can_move(identity.layout)
    assert StateForm.of(identity) == StateForm(4, True, 32)
    assert identity_from_gguf(gguf_path) == identity


@pytest.mark.parametrize(
    "other",
    [{"cache_type": "f32"}, {"flash_attention": False}, {"state_version": 3}, {"computed_with": "lora a 0.5"}],
)
def test_other_settings_make_another_identity(gguf_path: Path, other: Any) -> None:
    one, another = identity_from_gguf(gguf_path), identity_from_gguf(gguf_path, **other)
    assert one.digest != another.digest
    assert one.difference(another.fields())


def test_other_weights_make_another_identity(gguf_path: Path, tmp_path: Path) -> None:
    one = identity_from_gguf(gguf_path)
    assert identity_from_gguf(write_gguf(tmp_path / "again.gguf")).weights == one.weights
    other = identity_from_gguf(write_gguf(tmp_path / "other.gguf", seed=1))
    assert other.difference(one.fields()).startswith("weights: ")
    assert other.tokenizer == one.tokenizer


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"ssm.state_size": 16}, "recurrent states"),
        ({"attention.sliding_window": 512}, "last tokens"),
        ({"attention.kv_lora_rank": 64}, "latents"),
        ({"attention.head_count_kv": 0}, "not every layer"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path, facts: Any, message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", **facts)
    with pytest.raises(UnsupportedModel, match=message):
        identity_from_gguf(path)


def test_keys_that_nobody_knows_to_move_are_kept_as_they_are(tmp_path: Path) -> None:
    identity = identity_from_gguf(write_gguf(tmp_path / "model.gguf", architecture="strange"))
    assert StateForm.of(identity).paired == 0
    assert not can_move(identity.layout)
    partly = identity_from_gguf(write_gguf(tmp_path / "partly.gguf", **{"rope.dimension_count": 16}))
    assert StateForm.of(partly).paired == 16
    assert "partial_rotary_factor" in partly.layout.rope


@pytest.mark.parametrize("bad", [{"cache_type": "q8_0"}, {"state_version": 2}, {"computed_with": "a;b"}])
def test_arguments_that_do_not_fit_are_named(gguf_path: Path, bad: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        identity_from_gguf(gguf_path, **bad)


def test_an_identity_of_another_engine_has_no_form() -> None:
    with pytest.raises(ConfigError, match="identity_from_gguf"):
        StateForm.of(ModelIdentity("m", "", "sampled-sha256:1;config:2", "", KVLayout.uniform(1, 1, 8)))


def test_a_model_that_is_split_is_named_by_its_first_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    whole = path.read_bytes()
    count = len("split.count")
    entry = struct.pack("<Q", count) + b"split.count" + struct.pack("<IH", 2, 2)
    keys = struct.unpack_from("<Q", whole, 16)[0]
    split = whole[:16] + struct.pack("<Q", keys + 1) + entry + whole[24:] + b"\0" * 64
    first, second = (tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    path.write_bytes(split)
    first.write_bytes(split)
    for wrong in (path, first):  # the second is missing
        with pytest.raises(ConfigError):
            identity_from_gguf(wrong)
    second.write_bytes(whole)
    assert identity_from_gguf(first).weights != identity_from_gguf(second).weights


def test_files_that_are_none_are_refused(gguf_path: Path, tmp_path: Path) -> None:
    draw, whole = random.Random(seeds.of("gguf")), gguf_path.read_bytes()
    path, refused = tmp_path / "bad.gguf", 0
    for trial in range(120):
        data = bytearray(whole[: draw.randrange(len(whole))] if trial % 2 else whole)
        for _ in range(draw.randint(1, 6)):
            if data:
                data[draw.randrange(min(len(data), 900))] = draw.choice((0, 255, draw.randrange(256)))
        path.write_bytes(data)
        try:
            identity_from_gguf(path)
        except KVStoreError:
            refused += 1
    assert refused > 40
    for data in (b"", b"GGUF", b"GGML" + whole[4:], whole[:16] + b"\xff" * 8 + whole[24:]):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="GGUF"):
            identity_from_gguf(path)


def test_a_file_without_layers_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    data, path = bytearray(gguf_path.read_bytes()), tmp_path / "bad.gguf"
    at = data.index(b".block_count") + len(b".block_count") + 4  # behind the type of the number
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="no layers"):
        identity_from_gguf(path)
