"""Pieces of caches that an engine names by a hash and not by tokens, in stores.

LMCache and engines like it cut sequences themselves and chain the hashes; what they hand over is a key and the memory
of a piece. Each becomes a sequence of its own, whose token ids are drawn from the hash of its key, so that no two share
anything, and whose keys and values are the piece as far as its shape tells them apart. So it is coded as any cache is,
checked when it is read, bounded, and there after a restart. A store holds pieces of one shape.
"""
