"""Core: what everything else speaks of. Tokens, keys, layouts, identities, the bytes of a record, and results.

Values come in, values go out: no I/O, no threads, and torch only inside of functions. May import errors, config and
metrics; two functions hand over to leaves of the transformers integration. Bytes made here are part of the format:
see FORMAT.md.
"""
