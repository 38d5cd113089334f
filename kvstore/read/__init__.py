"""The way of a get: tokens come in, a `Hit` goes out.

In this order: `lookup` finds the stored blocks of the longest prefix, `placement` chooses the device to decode on,
`fetch` reads, `decode` checks and decodes, `result` holds the tensors. `get` runs these steps. May import residency,
dedup and what is below them, never write. Nothing that a record holds raises: a block that fails ends the prefix.
"""
