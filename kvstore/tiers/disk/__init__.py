"""The disk tier: records in segment files, and an LMDB catalog that says where they are.

`tier` reads, writes and removes; `segments` and `space` keep the files, `catalog` and `entry` the index, `open` and
`rebuild` bring both back after a crash. Sealed records come in, entries and bytes go out. All calls to the file system
go through `fs`. FORMAT.md has the bytes.
"""
