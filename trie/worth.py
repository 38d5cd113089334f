"""What a donor's tokens are worth by their distance from the seam, where the tokens that both contexts share begin.

A token attended to another context behind its donor than here, and most so right behind the seam. A token `d` tokens
behind it is expected to save the share

    a + (1 - a) * d / (d + h),    a = AT_SEAM, h = HALFWAY

of what coding it alone takes. a and h are estimates, not fits. This is the one law for choosing donors: ContentIndex
(csrc/content/find.cc) compares spans by it in fixed point, and who codes blocks decides by it whether a donor pays.
What a *cache* assembled from donors errs is another question, with fitted constants of its own
(kvstore.approximate.plan).
"""

from __future__ import annotations

AT_SEAM = 0.6
"""Of a token right behind the seam."""
HALFWAY = 64
"""Tokens behind the seam to halfway between AT_SEAM and 1."""
FAR = 4096
"""The index takes tokens further away than this as worth no more."""
UNIT = 1 << 16
"""1.0 in the fixed point of the index."""


def token_worth(distance: int) -> float:
    """Return the worth of a token, 0 to 1, by its distance behind the seam in tokens.

    Example:
        >>> token_worth(0), token_worth(64)
        (0.6, 0.8)
    """
    return AT_SEAM + (1 - AT_SEAM) * distance / (distance + HALFWAY)


def span_worth(run: int, length: int) -> float:
    """Return the worth, in tokens, of `length` tokens in a row; the first lies `run` tokens behind the seam."""
    return sum(token_worth(distance) for distance in range(run, run + length))


def weight(distance: int) -> int:
    """Return `token_worth` as the index has it, in 1/UNIT, rounded down."""
    near = round(AT_SEAM * UNIT)
    d = min(distance, FAR)
    return near + (UNIT - near) * d // (d + HALFWAY)
