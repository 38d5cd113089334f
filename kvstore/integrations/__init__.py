"""Integrations: a folder for each engine, which knows the store; the store does not know it.

Each makes an identity from the engine's model, tensors for `put` from its cache, and its cache from a `Hit`. The engine
is imported only when its folder is used.
"""
