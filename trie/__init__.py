"""The probabilistic trie: which prefixes are stored, in which records, and how much information they
carry."""

from kvstore.trie.index import Match, TrieIndex
from kvstore.trie.prior import MAX_BITS_PER_TOKEN, UNIFORM_BITS_PER_TOKEN, bits_from_logprobs

__all__ = ["MAX_BITS_PER_TOKEN", "UNIFORM_BITS_PER_TOKEN", "Match", "TrieIndex", "bits_from_logprobs"]
