"""The CPU levels that this machine runs, worst first."""

from __future__ import annotations

from kvstore.codecs.levels import cpu_levels

__all__ = ["cpu_levels"]
