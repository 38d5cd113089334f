"""Dedup: blocks that are coded as their difference from other blocks with the same tokens.

`match` decides which new blocks become members and which may be donors, `encode` codes a member, `donor_cache` reads
and decodes donors. Who needs whom is remembered in residency. May import residency, tiers, codecs and trie.
"""
