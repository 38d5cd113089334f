"""Fits the lossy mode of the predictive codec."""
