"""The way of a put: tokens and tensors come in, durable records go out.

In this order: `put` takes the blocks in, `plan` says which are missing, `queue` holds them, `encode` codes a group,
`commit` makes it durable. `standalone` codes members anew before their donors leave. May import read (to decode such
members), dedup, residency and what is below them.
"""
