"""Codec 6, temporal state compression: differences from keyframes in 4 bits, with loss. `codec.py` is the codec,
`frames.py` what a layer is made of, `pages.py` how differences are quantised; `reference.py` decodes the same bytes
plainly."""
