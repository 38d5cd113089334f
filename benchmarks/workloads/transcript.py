"""An agent's growing transcript whose beginning is edited every few turns: another date, another tool description."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta

from benchmarks.conversations import SYSTEM_PROMPT
from benchmarks.workloads.arrival import Arrival
from benchmarks.workloads.text import Text

FIRST_DAY = date(2026, 11, 21)
TOOLS = (
    "search(query) returns titles and first lines of matching notes.",
    "search(query, limit) returns titles, dates and first lines of the best matching notes.",
)
LONGEST = 200  # tokens of a turn: those of agents are short, and an edit should come every few hundred
TRANSCRIPTS, TOKENS, TURNS_BETWEEN = 2, 2000, 3
TRANSCRIPTS_QUICK, TOKENS_QUICK, TURNS_BETWEEN_QUICK = 1, 1000, 2


def edited_transcript(text: Text, quick: bool) -> Iterator[Arrival]:
    """Each transcript is put at every turn until it has so many tokens."""
    transcripts = TRANSCRIPTS_QUICK if quick else TRANSCRIPTS
    for number in range(transcripts):
        yield from transcript(
            text, number, TOKENS_QUICK if quick else TOKENS, TURNS_BETWEEN_QUICK if quick else TURNS_BETWEEN
        )


def transcript(text: Text, number: int, most: int, between: int) -> Iterator[Arrival]:
    """One transcript of at most `most` tokens, edited before every `between`-th turn, by turns in its date and in its
    tools; longer turns than `LONGEST` are left out. Only arrivals right after an edit have a counterpart: the others
    add a turn to a stored prefix."""
    turns: list[int] = []
    edits = count = 0
    while True:
        for user, assistant in text.dialogue():
            if len(user) + len(assistant) > LONGEST:
                continue
            count += 1
            edited = count > 1 and (count - 1) % between == 0
            edits += edited
            turns += user + assistant
            tokens = beginning(text, number, edits) + turns
            if len(tokens) > most:
                return
            yield Arrival.of(tokens, edited)


def beginning(text: Text, number: int, edits: int) -> list[int]:
    """The system prompt of transcript `number` after so many edits."""
    today = FIRST_DAY + timedelta(days=7 * number + (edits + 1) // 2)
    prompt = SYSTEM_PROMPT.replace(TOOLS[0], TOOLS[edits // 2 % 2])
    return text.system(f"Today is {today:%A, %d %B %Y}. {prompt}")
