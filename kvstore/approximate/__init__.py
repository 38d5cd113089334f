"""Caches for tokens whose exact prefix was never computed, put together from the rows of donors.

`plan` chooses the rows and estimates what they cost; `assemble` reads and rotates them behind the stored prefix. Tokens
come in, an approximate `Hit` goes out, which no put accepts. May import read, dedup, residency and what is below them.
"""
