"""`learn`: fits a profile to the blocks of a store, and writes its records anew with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvstore.cli import stores
from kvstore.cli.errors import told
from kvstore.cli.output import AsJson, line, print_json, progress_bars


def learn(store: stores.Store, as_json: AsJson = False) -> None:
    """Fit a profile to the blocks of a store, and write its records anew with it. Needs no model; evicts nothing."""
    with told(as_json, "interrupted; nothing is lost, and the same command goes on from here"):
        with stores.writing(store) as opened, progress_bars(as_json) as progress:
            document = asdict(opened.learn(progress))
    if as_json:
        print_json(document)
        return
    line(f"{store}: {_summary(document)}")


def _summary(status: dict[str, Any]) -> str:
    """What came of it."""
    if not status["held_out"]:
        return f"{status['state']}: {status['why']}"
    adopted = status["state"] == "adopted"
    what = f"a profile of {status['profile_bytes'] / 1e6:.1f} MB" if adopted else status["why"]
    ratios = f"{status['before']:.3f} before, {status['after']:.3f} now"
    return f"{status['state']}: {what}; ratio of {status['held_out']} blocks that were kept back: {ratios}"
