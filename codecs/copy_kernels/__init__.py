"""Copies between the tensors of two views on one GPU, all in one launch."""
