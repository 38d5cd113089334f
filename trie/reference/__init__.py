"""The trie and the content index as plain programs: what the C++ is tested against. Nothing of the store imports them.

`trie` and `tree` are the index of prefixes, `content` is the index that finds donors.
"""
