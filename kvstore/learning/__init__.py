"""Learning from the store: a profile fitted to the blocks that a store holds, in idle time (docs/learning.md).

`sample` chooses blocks, `windows` shows them to the fit of the calibration, `trial` fits and measures, `learner` is the
thread that does so when nobody calls the store, `recode` writes cold records anew with what was learned.
"""
