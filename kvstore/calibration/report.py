"""What a calibration found, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.codecs.profile import Profile

if TYPE_CHECKING:
    from rich.table import Table

_BF16_BITS = 16


def table(profile: Profile) -> Table:
    """A row for every part: what it takes a value on text that it was not fitted to, and what it adds to the profile.

    The last column has what was measured after fits to fewer windows.
    """
    from rich.table import Table

    windows = profile.report["windows"]
    title = (
        f"{windows['held_out']} of {windows['fit'] + windows['held_out']} windows of {windows['tokens']} tokens kept"
    )
    found = Table(title=f"On held-out text ({title} back)")
    for name in ("part", "bits/value", "ratio", "MB", "windows: bits/value"):
        found.add_column(name, justify="left" if name in ("part", "windows: bits/value") else "right")
    for name, row in profile.report["parts"].items():
        megabytes = profile.report["bytes"][name] / 1e6
        bits = row.get("bits_per_value")
        if bits is None:
            kept = "nothing measured" if row["within"] is None else f"KL within its bound: {row['within']:.0%}"
            found.add_row(name, "", "", f"{megabytes:.1f}", f"{kept} ({row['cases']} cases)")
            continue
        curve = "  ".join(f"{count}: {value:.3f}" for count, value in row.get("curve", ()))
        found.add_row(name, f"{bits:.3f}", f"{_BF16_BITS / bits:.2f}", f"{megabytes:.1f}", curve)
    return found


def size_line(profile: Profile) -> str:
    """How large the profile is, also compared with its model."""
    share = profile.nbytes / max(1, profile.report["model_bytes"])
    return f"{profile.nbytes / 1e6:.1f} MB, {share:.1%} of the model; profile {profile.id.hex()}"
