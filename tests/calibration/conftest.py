"""The caches that most tests of calibration fit to."""

from __future__ import annotations

import calibrated
import pytest

from kvstore.calibration.dump import KVDump


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> KVDump:
    return calibrated.dump(tmp_path_factory.mktemp("dump"))
