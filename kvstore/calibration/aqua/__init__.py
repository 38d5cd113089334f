"""Fits AQUA-KV's predictors to a dump (`fit`) and measures them on held-out windows (`quality`). The codec is
`codecs/aqua`."""
