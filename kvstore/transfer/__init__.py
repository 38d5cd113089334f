"""Stored sequences on their way from one store to another: a copy into a store, and one file for another machine.

`copy` merges what one open store has into another one; `bundle` makes a small store one file, and the file a store.
"""
