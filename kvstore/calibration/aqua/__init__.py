"""Fits AQUA-KV's predictors."""
