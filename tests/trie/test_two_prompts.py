"""Two prompts before the same 1,000 tokens, the paper's example: the trie holds them apart, the content index finds
what they share. docs/probabilities.md has them with a model's bits."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.trie import Clusters, TrieIndex
from kvstore.trie.content import ContentIndex

SPACE = bytes(32)
CHANCE = np.random.default_rng(0)
BITS = 3.0  # of a token, as of conversations
HELPFUL, ASSISTANT = (np.array([1, 2, 3, last, 5], np.uint32) for last in (10, 11))  # "You are a ... / an ..."
DOCUMENT, OTHER = (CHANCE.integers(100, 50_000, 1000).astype(np.uint32) for _ in range(2))


def sequence(prompt: np.ndarray, document: np.ndarray) -> np.ndarray:
    return np.concatenate([prompt, document])


@pytest.fixture
def index() -> TrieIndex:
    made = TrieIndex(64)
    for record, ids in enumerate((sequence(HELPFUL, DOCUMENT), sequence(ASSISTANT, DOCUMENT)), 1):
        ends, records = np.array([len(ids)], np.uint32), np.array([record], np.uint64)
        made.insert(SPACE, ids, ends, records, bits=np.full(len(ids), BITS, np.float32))
    return made


def test_they_are_two_clusters_at_any_radius_that_tells_documents_apart(index: TrieIndex) -> None:
    p, q = sequence(HELPFUL, DOCUMENT), sequence(ASSISTANT, DOCUMENT)
    distance = index.distance(SPACE, p, q)
    assert distance > 1000 * BITS  # both documents, though they are the same one; the traffic made them likelier
    for radius, count in ((64.0, 2), (0.99 * distance, 2), (1.01 * distance, 1)):
        clusters = Clusters(index, radius)
        clusters.load()
        assert len(clusters.clusters()) == count


def test_what_both_begin_with_does_not_tell_the_same_document_from_another_one(index: TrieIndex) -> None:
    p = sequence(HELPFUL, DOCUMENT)
    same, other = (index.shared_bits(SPACE, p, sequence(ASSISTANT, document)) for document in (DOCUMENT, OTHER))
    assert same == pytest.approx(other)
    assert same < index.shared_bits(SPACE, p, sequence(HELPFUL, OTHER))  # the paper's "farther"


def test_the_content_index_finds_the_document_behind_the_other_prompt() -> None:
    content, stored = ContentIndex(seed=1), sequence(HELPFUL, DOCUMENT)
    for record, start in enumerate(range(0, len(stored) - 63, 64), 1):
        content.insert(SPACE, record, record - 1, stored[start : start + 64])
    found = content.find(SPACE, sequence(ASSISTANT, DOCUMENT))
    assert sum(span.length for span in found) > 900
    assert not content.find(SPACE, sequence(ASSISTANT, OTHER))
