"""What compiling kernels found out, once a run."""

from __future__ import annotations

import pytest
from kernelruns import Compiled


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Of the module's `SCRIPT`."""
    return Compiled.of(request.module.SCRIPT, tmp_path_factory)
