"""Fits what the donor codec carries from layer to layer."""
