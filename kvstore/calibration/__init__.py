"""Calibration: what a model does to text, and what is fitted to it. Writes the profiles that codecs read.

Imports without torch and transformers; their parts import what they need.
"""
