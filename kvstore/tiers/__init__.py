"""Tiers: where records are kept, each within a budget. Device, host and disk.

`base` says what a tier and a source promise; `memory` is the device's and the host's tier, `disk` that of files.
`profiles` and `codecs` choose what new records are coded with. Records come in by number, sources go out. May import
codecs, eviction and core, never the index: a tier does not know whose prefix a record is.
"""
