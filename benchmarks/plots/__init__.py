"""Draws the figures of the documents from the rows in `benchmarks/results`; needs matplotlib."""
