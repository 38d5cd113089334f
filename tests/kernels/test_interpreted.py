"""All kernels in triton's interpreter, which needs no GPU: the interpreted*.py scripts, several groups a process."""

from __future__ import annotations

import pytest
from kernelruns import FULL, needs_triton, run_script

pytestmark = needs_triton

# A script is imported once a row; rows are what two workers can share. The longest first. Each codec's kernels against
# its reference, what damages them, and a store.
RUNS = [
    ("interpreted_predict.py", "shapes"),
    ("interpreted_levels.py", "hostile golden"),
    ("interpreted.py", "lengths strides dtypes hostile"),
    ("interpreted_groups.py", "codec"),
    ("interpreted_store.py", "joined store"),
    ("interpreted_rans.py", "lengths hostile"),
    ("interpreted_lossy.py", "mode"),
    ("interpreted_copies.py", "strides by_kernel"),
]
# `make test-kernels` runs all.
ALL = [
    ("interpreted_predict.py", "shapes"),
    ("interpreted_predict.py", "wide prefixes arguments"),
    ("interpreted_predict.py", "long hostile"),
    ("interpreted_predict.py", "refusals views"),
    ("interpreted_predict_codec.py", "counting"),
    ("interpreted_predict_codec.py", "coding sample refusing"),
    ("interpreted_predict_codec.py", "once trial waits stored"),
    ("interpreted_predict_codec.py", "failures"),
    ("interpreted_levels.py", "shapes long prefixes limits"),
    ("interpreted_levels.py", "hostile trial golden"),
    ("interpreted_groups_store.py", "counting"),
    ("interpreted_groups_store.py", "stored"),
    ("interpreted_groups.py", "codec partial failing"),
    ("interpreted_groups.py", "shapes long prefixes limits"),
    ("interpreted_groups.py", "hostile latents trial"),
    ("interpreted_lossy.py", "long mode"),
    ("interpreted_lossy.py", "shapes hostile codec"),
    ("interpreted.py", "lengths contents strides dtypes prefixes hostile look_back"),
    ("interpreted_rans.py", "lengths divisions refusals hostile arguments"),
    ("interpreted_copies.py", "strides dtypes by_kernel"),
    ("interpreted_store.py", "control encoding joined decoding hostile tier store"),
]
if FULL:
    RUNS = ALL


@pytest.mark.slow
@pytest.mark.parametrize(("script", "groups"), RUNS, ids=[f"{script}: {groups}" for script, groups in RUNS])
def test_kernels_do_what_the_reference_does(script: str, groups: str) -> None:
    assert run_script(script, *groups.split()).split() == groups.split()


def test_an_unknown_group_fails() -> None:
    with pytest.raises(AssertionError, match="KeyError"):
        run_script("interpreted_rans.py", "nothing")
