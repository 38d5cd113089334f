"""Codec 3, donor: rows of a block as their difference from the same tokens' rows in other blocks.

`codec` codes blocks: exactly, or in `steps` with loss. `spans` says which rows have donors, `model` is the profile's
section, `reference` and `steps_reference` are the codec as plain programs. Rows without donors go to another codec.
docs/codecs/donor.md and docs/semantic.md say when it pays.
"""
