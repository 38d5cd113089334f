"""The mode in groups: rows coded by csrc/donor/groups.h, or by the GPU that holds the block.

Kernels code for a device (kernels/blocks.py) once it has shown that it writes the CPU's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import kvstore.codecs.donor._donor_groups as _donor_groups
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.device import buffer_on_cpu, copy_on_cpu, wait_for
from kvstore.codecs.donor.spans import SpanTable
from kvstore.codecs.predictive.levels.mode import native_arguments
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.predictive.on_device import Devices
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError, ProfileError

if TYPE_CHECKING:
    import torch

    from kvstore.codecs.donor.groups.kernels.blocks import LoadedGroups


@dataclass(frozen=True)
class _Made:
    layout: KVLayout
    coder: _donor_groups.Coder
    devices: Devices[LoadedGroups]


class GroupsMode:
    """Codes rows of blocks of the model's layout against rows of donors, on the device that holds the block or on the
    CPU. Thread-safe: `_lock` guards `_made`."""

    def __init__(self, make: Callable[[], LevelModel]) -> None:
        """make: gives the model of differences when it is first needed, see `groups_model`."""
        self._make, self._lock = make, Lock()
        self._made: _Made | None = None

    def knows(self, info: BlockInfo) -> bool:
        """Whether the model is of the block's layout and knows its positions. Raises `ProfileError` as `make`."""
        made = self._ready()
        return made.layout == info.layout and 0 <= info.start <= made.coder.positions - info.count

    def codes_on(self, device: torch.device) -> bool:
        """Whether blocks on `device` (a GPU with its index) are coded there; see `Devices.coder`."""
        try:
            return self._ready().devices.coder(device) is not None
        except ProfileError:
            return False  # which is raised where a block is coded

    def codes_like(self, view: KVView) -> bool:
        """Whether kernels code blocks like this view, of the model's layout, on the device that holds it."""
        return not view.on_cpu and self._ready().devices.coder_for(view) is not None

    def _ready(self) -> _Made:
        with self._lock:
            if self._made is None:
                model = self._make()
                coder = native_coder(model)
                self._made = _Made(model.layout, coder, Devices(model.layout, _trial(model, coder)))
            return self._made

    def encode(
        self, info: BlockInfo, block: KVView, table: SpanTable, donors: Sequence[KVView], out: memoryview
    ) -> tuple[int, ...] | None:
        """Write the layers of the rows in spans; None if `out` is too small. All views have K in pairs; donors are on
        the CPU, the block is on any device."""
        made = self._ready()
        coder = made.devices.coder_for(block)
        if coder is not None:
            from kvstore.codecs.donor.groups.kernels.blocks import encode_into

            with made.devices.watched(coder):
                return encode_into(coder, info, block, table, donors, out)
        return _encode_on_cpu(made.coder, info, block if block.on_cpu else copy_on_cpu(block), table, donors, out)

    def decode(
        self,
        info: BlockInfo,
        payload: memoryview,
        sizes: Sequence[int],
        table: SpanTable,
        donors: Sequence[KVView],
        out: KVView,
    ) -> None:
        """The inverse, into `out`, which may have fewer rows. Raises `CodecError`."""
        made = self._ready()
        coder = made.devices.coder_for(out)
        if coder is not None:
            from kvstore.codecs.donor.groups.kernels.blocks import decode_from

            with made.devices.watched(coder):
                if decode_from(coder, info, payload, sizes, table, donors, out):
                    raise CodecError("donor: the block is damaged, or a donor or the profile is another one")
                return
        target = out if out.on_cpu else buffer_on_cpu(out)
        wrong = _donor_groups.decode(*_call(made.coder, info, payload, sizes, table, donors, target))
        if wrong is not None:
            raise CodecError(wrong)
        if target is not out:
            target.copy_to(out)
            wait_for(out.devices)

    def in_order(
        self,
        info: BlockInfo,
        payload: memoryview,
        sizes: Sequence[int],
        table: SpanTable,
        donors: Sequence[KVView],
        out: KVView,
    ) -> _donor_groups.InOrder:
        """As `decode`, on the CPU, layer after layer. Whoever calls it keeps the memory of all views."""
        return _donor_groups.in_order(*_call(self._ready().coder, info, payload, sizes, table, donors, out))


def _call(
    coder: _donor_groups.Coder,
    info: BlockInfo,
    payload: memoryview,
    sizes: Sequence[int],
    table: SpanTable,
    donors: Sequence[KVView],
    out: KVView,
) -> tuple[Any, ...]:
    """The arguments of `_donor_groups.decode`."""
    rows = [view.rows for view in donors]
    return coder, info.start, info.count, out.rows, table.runs, rows, table.angles, payload, sizes, out.tokens


def _encode_on_cpu(
    coder: _donor_groups.Coder,
    info: BlockInfo,
    block: KVView,
    table: SpanTable,
    donors: Sequence[KVView],
    out: memoryview,
) -> tuple[int, ...] | None:
    rows = [view.rows for view in donors]
    return _donor_groups.encode(coder, info.start, info.count, block.rows, table.runs, rows, table.angles, out)


def _trial(model: LevelModel, coder: _donor_groups.Coder) -> Callable[[torch.device], LoadedGroups | None]:
    """See the trial of `Devices`."""

    def tried_on(device: torch.device) -> LoadedGroups | None:
        from kvstore.codecs.donor.groups.kernels.blocks import tried

        return tried(model, partial(_encode_on_cpu, coder), device)

    return tried_on


def native_coder(model: LevelModel) -> _donor_groups.Coder:
    """The same model for csrc/donor/groups.h."""
    return _donor_groups.Coder(**native_arguments(model))
