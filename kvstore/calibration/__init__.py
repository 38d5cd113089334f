"""Calibration: a model and text come in, a profile that codecs read goes out.

`calibrate` is the whole run, `dump` the model's caches in files, `sections` the parts of a profile; the folders fit one
codec each. Stands above the store; needs only codecs and
core of it. Nothing here is needed to run a store. This
package imports without torch and transformers; its modules import what they need.
"""
