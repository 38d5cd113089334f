"""What a server tells of keys that others write and remove."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstore.core.waiting import Flag
from kvstore.errors import RemoteError, RemoteUnavailable
from kvstore.tiers.remote.deadline import Deadline
from kvstore.tiers.remote.engines.resp.connection import Connection, command, refuse
from kvstore.tiers.remote.engines.resp.replies import Push
from kvstore.tiers.remote.keys import is_key

_QUIET_S = 1.0  # after so much silence the server is asked whether it is there
_ANSWER_S = 2.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0  # before it is connected to again
_STEP_S = 0.1  # within which `end` is heard


class ChangeFeed:
    """A thread that listens to one server, and connects again when the connection is lost.

    Args:
        connect: opens a connection.
        prefix: of the keys that are of interest.
        callback: see `ChangingEngine.changes`.
    """

    def __init__(
        self,
        connect: Callable[[Deadline], Connection],
        prefix: str,
        callback: Callable[[Sequence[str] | None], None],
    ) -> None:
        self.keys = 0  # that were told of
        self.losses = 0  # of the connection, and connections that could not be opened
        self._connect = connect
        self._prefix = prefix
        self._callback = callback
        self._ended = Flag()
        threading.Thread(target=self._run, name="kvstore-changes", daemon=True).start()

    def end(self) -> None:
        """Let the thread end; it calls back at most once more."""
        self._ended.set()

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._ended.is_set():
            try:
                connection = self._subscribed()
                try:
                    self._callback(None)  # what changed before this is not known
                    wait_s = _FIRST_WAIT_S
                    self._listen(connection)
                finally:
                    connection.close()
            except RemoteError:
                self.losses += 1
                self._ended.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _subscribed(self) -> Connection:
        deadline = Deadline(_ANSWER_S)
        connection = self._connect(deadline)
        try:
            (reply,) = connection.ask([command("CLIENT", "TRACKING", "ON", "BCAST", "PREFIX", self._prefix)], deadline)
            refuse(reply)
        except BaseException:
            connection.close()
            raise
        return connection

    def _listen(self, connection: Connection) -> None:
        quiet_s, is_asked = 0.0, False
        while not self._ended.is_set():
            if not connection.wait(_STEP_S):
                quiet_s += _STEP_S
                if is_asked and quiet_s > _ANSWER_S:
                    raise RemoteUnavailable("the server says nothing any more")
                if not is_asked and quiet_s > _QUIET_S:
                    connection.send([command("PING")], 1, Deadline(_ANSWER_S))
                    quiet_s, is_asked = 0.0, True
                continue
            said = connection.hear(Deadline(_ANSWER_S))
            quiet_s = 0.0
            if isinstance(said, Push):
                self._tell(said)
            else:
                is_asked = False  # the answer to PING

    def _tell(self, push: Push) -> None:
        match push.items:
            case [b"invalidate", None]:
                self._callback(None)  # everything was removed
            case [b"invalidate", [*names]]:
                found = [name.decode("ascii", "replace") for name in names if isinstance(name, bytes)]
                keys = [key for key in found if key.startswith(self._prefix) and is_key(key)]
                self.keys += len(keys)
                if keys:
                    self._callback(keys)
