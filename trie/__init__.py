"""The probabilistic trie: which prefixes are stored, in which records, and how much information they
carry."""

from kvstore.trie.index import Match, TrieIndex
from kvstore.trie.prior import (
    CONCENTRATION,
    MAX_BITS_PER_TOKEN,
    UNIFORM_BITS_PER_TOKEN,
    UNIFORM_LOGPROB,
    bits_from_logprobs,
    mixture_bits,
)
from kvstore.trie.semantic import Cluster, Clusters

__all__ = [
    "CONCENTRATION",
    "MAX_BITS_PER_TOKEN",
    "UNIFORM_BITS_PER_TOKEN",
    "UNIFORM_LOGPROB",
    "Cluster",
    "Clusters",
    "Match",
    "TrieIndex",
    "bits_from_logprobs",
    "mixture_bits",
]
