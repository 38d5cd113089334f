"""Residency: where every record is, and what the store knows of it.

Blocks arrive and leave here, by one passage each and under one lock (`ledger`, `residency`). `states` is the table of
what a record may be; `check` holds a store against it. Blocks come in, sources that readers decode go out. May import
tiers, codecs, trie, eviction and core; nothing here knows who reads or writes.
"""
