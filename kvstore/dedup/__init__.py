"""Blocks that are coded against others with the same tokens: who needs whom, and how they are found, read and left."""
