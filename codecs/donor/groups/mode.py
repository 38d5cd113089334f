"""The mode in groups on the CPU: rows coded by csrc/donor/groups.h."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import kvstore.codecs.donor._donor_groups as _donor_groups
from kvstore.codecs.base import BlockInfo
from kvstore.codecs.donor.spans import SpanTable
from kvstore.codecs.predictive.levels.mode import native_arguments
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.view import KVView
from kvstore.core.layout import KVLayout
from kvstore.errors import CodecError


class GroupsMode:
    """Codes rows of blocks of the model's layout against rows of donors. Thread-safe: `_lock` guards `_made`."""

    def __init__(self, make: Callable[[], LevelModel]) -> None:
        """make: gives the model of differences when it is first needed, see `groups_model`."""
        self._make, self._lock = make, Lock()
        self._made: tuple[KVLayout, _donor_groups.Coder] | None = None

    def knows(self, info: BlockInfo) -> bool:
        """Whether the model is of the block's layout and knows its positions. Raises `ProfileError` as `make`."""
        layout, coder = self._ready()
        return layout == info.layout and 0 <= info.start <= coder.positions - info.count

    def _ready(self) -> tuple[KVLayout, _donor_groups.Coder]:
        with self._lock:
            if self._made is None:
                model = self._make()
                self._made = model.layout, native_coder(model)
            return self._made

    def encode(
        self, info: BlockInfo, block: KVView, table: SpanTable, donors: Sequence[KVView], out: memoryview
    ) -> tuple[int, ...] | None:
        """Write the layers of the rows in spans; None if `out` is too small. All views have K in pairs."""
        rows = [view.rows for view in donors]
        return _donor_groups.encode(
            self._ready()[1], info.start, info.count, block.rows, table.runs, rows, table.angles, out
        )

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
        rows = [view.rows for view in donors]
        coder = self._ready()[1]
        wrong = _donor_groups.decode(
            coder, info.start, info.count, out.rows, table.runs, rows, table.angles, payload, sizes, out.tokens
        )
        if wrong is not None:
            raise CodecError(wrong)


def native_coder(model: LevelModel) -> _donor_groups.Coder:
    """The same model for csrc/donor/groups.h."""
    return _donor_groups.Coder(**native_arguments(model))
