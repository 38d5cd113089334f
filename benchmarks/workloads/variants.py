"""System prompts that say nearly the same, or something else, before the same long documents.

The donor codec's tables were fitted behind other prompts (tools/make_donor_tables.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.workloads.arrival import Arrival
from benchmarks.workloads.text import Text

BASE = "You help a small team with its letters."
NEAR_SYNONYM = "You support a small team with its mail."
OTHER_INSTRUCTION = (
    "Say in three short paragraphs what the reader has to decide, and quote the sentences that you rely on."
)
DOCUMENTS, DOCUMENTS_QUICK = (1000, 1300, 1600, 1900), (512,)  # tokens
FOLLOWING = 256


def near_synonym(text: Text, quick: bool) -> Iterator[Arrival]:
    return variants(text, NEAR_SYNONYM, DOCUMENTS_QUICK if quick else DOCUMENTS)


def other_instruction(text: Text, quick: bool) -> Iterator[Arrival]:
    return variants(text, OTHER_INSTRUCTION, DOCUMENTS_QUICK if quick else DOCUMENTS)


def variants(text: Text, variant: str, documents: tuple[int, ...]) -> Iterator[Arrival]:
    """Each document behind `BASE`, then behind `variant`."""
    for length in documents:
        document, following = text.take(length), text.take(FOLLOWING)
        user = text.ids("<|im_start|>user\n")
        for prompt in (BASE, variant):
            yield Arrival.of(text.system(prompt) + user + document, prompt != BASE, following)
