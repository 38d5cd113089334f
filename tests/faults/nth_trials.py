"""Every call that LMDB makes fails, one after the other. Run by helpers/trials.py, with shim.c preloaded."""

from __future__ import annotations

import failing
import shim
import small_stores
from faultfs import FaultFS

# What LMDB calls below the folder of the catalog, and how each can fail. Without an end EINTR is no failure: whoever is
# interrupted tries again.
CALLS = {
    "open": ("EIO", "ENOSPC", "EINTR", "EMFILE"),
    "pwrite": ("EIO", "ENOSPC", "EINTR", "short"),
    "write": ("EIO", "ENOSPC", "EINTR", "short"),
    "sync": ("EIO", "ENOSPC", "EINTR"),
    "truncate": ("EIO", "ENOSPC"),
    "mmap": ("EIO",),
    "read": ("EIO", "EINTR", "short"),
}
_MOST = 2000


def every(script: str, call: str, code: str, sticky: bool, firsts: int, step: int, offset: int) -> dict[str, int]:
    """Makes the nth call fail, for n = 1, 2, ... until the script makes fewer calls. After the first few only every
    step-th n."""
    driver, struck = shim.Driver(), 0
    for nth in range(1, _MOST):
        if nth > firsts and nth % step != offset % step:
            continue
        hits = _once(driver, script, call, nth, code, sticky)
        if not hits:
            return {"runs": struck, "calls": nth - 1}
        struck += 1
    raise AssertionError(f"{_MOST} calls of {call} were not enough")


def _once(driver: shim.Driver, script: str, call: str, nth: int, code: str, sticky: bool) -> int:
    hits = 0

    def heal() -> None:
        nonlocal hits
        hits = driver.heal()

    with small_stores.scratch() as folder:
        driver.fail(folder / "store" / "catalog", call, nth, code, sticky)
        try:
            failing.SCRIPTS[script](folder / "store", FaultFS(), heal)
        except BaseException as error:
            raise AssertionError(f"call {nth} of {call}") from error
        finally:
            driver.heal()
    return hits
