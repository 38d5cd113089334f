"""Conversations of several turns, interleaved: what many users of one assistant leave."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.conversations import SYSTEM_PROMPT
from benchmarks.workloads.arrival import Arrival
from benchmarks.workloads.text import Text

SESSIONS, SESSIONS_QUICK = 6, 2
TURNS, TURNS_QUICK = 4, 2


def sharegpt(text: Text, quick: bool) -> Iterator[Arrival]:
    """Every session puts its cache after each of its turns; they have the system prompt in common, and whatever
    their users repeat."""
    turns = TURNS_QUICK if quick else TURNS
    sessions: list[list[tuple[list[int], list[int]]]] = []
    while len(sessions) < (SESSIONS_QUICK if quick else SESSIONS):
        dialogue = text.dialogue()
        if len(dialogue) >= turns:
            sessions.append(dialogue)
    so_far = [text.system(SYSTEM_PROMPT) for _ in sessions]
    for turn in range(turns):
        for number, session in enumerate(sessions):
            so_far[number] = so_far[number] + session[turn][0] + session[turn][1]
            yield Arrival.of(so_far[number], False)
