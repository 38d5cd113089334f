"""Benchmarks: one file for each question, run as `python -m benchmarks.NAME`.

`common` has what they share; `workloads` makes the data, `peers` are the rivals, `plots` draws, `results` keeps the
rows of the figures in the documents. They import kvstore like a program does, and nothing of kvstore imports them.
"""
