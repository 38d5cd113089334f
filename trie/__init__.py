"""The probabilistic trie: which prefixes are stored, in which records, and how much information they carry.

`index` is the trie, `content` finds tokens at any place behind any prefix, `prior` and `semantic` are probabilities and
what follows from them, `worth` says what a donor saves. Tokens come in, record numbers go out; what a record holds is
unknown here. May import core. The work is done in C++ (`csrc/trie`, `csrc/content`).
"""

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
