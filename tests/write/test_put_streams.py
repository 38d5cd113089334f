"""What a put tells the streams of a GPU: before the store's threads look at its tensors, and before the program may
write into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvcases import SMALL, kv_of, open_store, tokens
from transformers import DynamicCache

from kvstore.codecs import KVView
from kvstore.write import encode, plan, put


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order."""
    found: list[str] = []

    def noting(name: str, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            found.append(name)
            return function(*arguments) if function is not None else None

        return noted

    def on_these(name: str) -> Callable[[Iterable[torch.device]], None]:
        def noted(devices: Iterable[torch.device]) -> None:
            assert set(devices) == {torch.device("cpu")}
            found.append(name)

        return noted

    monkeypatch.setattr(put, "publish", on_these("published"))
    monkeypatch.setattr(put, "follow", on_these("followed"))
    monkeypatch.setattr(plan, "publish", on_these("clones published"))
    monkeypatch.setattr(put, "view_from", noting("viewed", plan.view_from))
    monkeypatch.setattr(encode, "own_stream", noting("encoded", encode.own_stream))
    return found


def test_tensors_are_published_before_they_are_looked_at_and_followed_when_they_were_copied(
    tmp_path: Path, events: list[str]
) -> None:
    with open_store(tmp_path) as store:
        store.put(tokens(7), kv_of(tokens(7)))
        store.flush()
    order = [name for name in events if name != "encoded"]  # by another thread, at any time after
    assert order == ["published", "viewed", "followed"]
    assert events.index("encoded") > events.index("viewed")


def test_tensors_that_are_only_referenced_are_not_followed(tmp_path: Path, events: list[str]) -> None:
    cache = DynamicCache()
    for number, (k, v) in enumerate(kv_of(tokens(7))):
        cache.update(k[None], v[None], number)
    with open_store(tmp_path) as store:
        store.put(tokens(7), cache)
    assert [name for name in events if name != "encoded"] == ["published", "viewed"]


def test_copies_on_a_device_are_published_when_they_were_made(
    monkeypatch: pytest.MonkeyPatch, events: list[str], tmp_path: Path
) -> None:
    class Posing:
        """Makes views of tensors as if they were on a device."""

        @staticmethod
        def of_layers(layout: Any, kv: Any, *, checked: bool = False) -> KVView:
            flat = [tensor for pair in kv for tensor in pair]
            return KVView(layout, flat[0].shape[1], None, flat, flat)

    monkeypatch.setattr(plan, "KVView", Posing)
    layers = kv_of(tokens(7))
    with open_store(tmp_path) as store:
        request = plan.PutRequest.of(SMALL, b"", b"", tokens(7), None, None, False)
        view = plan.view_from(request, layers, 2, store._engine.put_path.pool)
    assert events == ["clones published"]
    assert view.tokens == 5
    assert view.tensors()[0].data_ptr() != layers[0][0][:, 2:].data_ptr()
