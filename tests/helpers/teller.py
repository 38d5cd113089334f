"""A child that tells through a pipe what it has done, and dies at a moment that is given."""

from __future__ import annotations

import os
import signal
import struct

import lives

ACK = struct.Struct("<cIH")  # kind, number of the sequence, length
# Where the first child of a life dies, whatever chance says: once it has told of something durable, and then of the
# first kind, it is killed at its next file call of this name, or where it is about to tell the second kind.
MOMENTS = {
    "put": [(b"p", "pwritev"), (b"p", "fdatasync"), (b"P", "pwritev")],
    "evict": [(b"p", "pwritev"), (b"p", "fdatasync")],
    "flush": [(b"p", "fdatasync"), (b"p", b"P"), (b"P", b"F")],
    "delete": [(b"d", b"D"), (b"s", b"S"), (b"D", "pwritev")],
    "erase": [(b"d", b"D"), (b"d", "pwritev"), (b"d", "fdatasync")],
    "recover": [(b"p", "pwritev"), (b"s", b"S")],
    "recode": [(b"d", b"D"), (b"d", "pwritev"), (b"d", "fdatasync")],
}


class PipeTeller(lives.Teller):
    """The child's pipe and its files: kills the process at its moment, if it has one."""

    def __init__(self, pipe: int, phase: str, moment: tuple[bytes, bytes | str] | None) -> None:
        super().__init__(before=self._called)
        self._pipe, self._moment = pipe, moment
        self._missing = {b"P", b"F", b"!" if phase == "evict" else b"P", b"R" if phase == "recode" else b"P"}
        self._armed = False

    def __call__(self, kind: bytes, number: int = 0, length: int = 0) -> None:
        if self._armed and self._moment is not None and kind == self._moment[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(self._pipe, ACK.pack(kind, number, length))
        if kind != b"F" or b"P" not in self._missing:  # a flush of nothing makes nothing durable
            self._missing -= {kind}
        if kind == b"d" and b"F" in self._missing:
            self._missing |= {b"P"}  # what was put may be what goes
        if kind == b"D" and length:
            self._missing -= {b"R"}  # a member was made to stand alone
        if kind == b"D":
            self._armed = False  # a delete that wrote nothing was no moment: another one will be
        self._armed |= not self._missing and self._moment is not None and kind == self._moment[0]

    def _called(self, call: str) -> None:
        if self._armed and self._moment is not None and call == self._moment[1]:
            os.kill(os.getpid(), signal.SIGKILL)
