"""Bridges to other software; each file imports its peer lazily or is imported on demand."""
