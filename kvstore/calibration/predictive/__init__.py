"""Fits the exact mode of the predictive codec."""
