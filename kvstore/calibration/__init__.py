"""Calibration: a model and text come in, a profile that codecs read goes out.

`calibrate` is the whole run, `dump` the model's caches in files, `sections` the parts of a profile; the folders fit one
codec each. It stands above the store, and nothing here is needed to run one. This package imports without torch and
transformers; its modules import what they need.
"""
