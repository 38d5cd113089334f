"""Codec 4, speculative: a cache as what another model's cache of the same tokens does not say of it.

`codec` is what is written. The models are the caller's (kvstore.integrations.transformers.predictor).
"""
