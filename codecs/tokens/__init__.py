"""Codec 8, tokens: a cache kept as the token ids that it was computed from, and what tells whether it came back.

`text` codes the ids, `archive` is what is written. The model that computes the cache again is the caller's
(kvstore.integrations.transformers.archive).
"""
