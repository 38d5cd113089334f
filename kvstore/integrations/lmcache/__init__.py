"""LMCache 0.5.6, multiprocess mode: a store as its L2 storage, by LMCache's adapter "plugin" (docs/lmcache.md)."""
