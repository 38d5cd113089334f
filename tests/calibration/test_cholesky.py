"""Systems that are solved block by block, compared with LAPACK's solver of the whole."""

from __future__ import annotations

import pytest
import torch

from kvstore.calibration.predictive.cholesky import factored, forward, solved

SIZES = (1, 2, 127, 128, 129, 300)


def definite(size: int) -> torch.Tensor:
    x = torch.randn(size, size + 5, generator=torch.Generator().manual_seed(size), dtype=torch.double)
    return x @ x.T + torch.eye(size, dtype=torch.double)


@pytest.mark.parametrize("size", SIZES)
def test_factors_are_those_of_the_whole(size: int) -> None:
    gram = definite(size)
    torch.testing.assert_close(factored(gram), torch.linalg.cholesky(gram))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("columns", [1, 256, 257])
def test_solutions_are_those_of_the_whole(size: int, columns: int) -> None:
    gram = definite(size)
    right = torch.randn(size, columns, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    given = gram.clone(), right.clone()
    torch.testing.assert_close(solved(gram, right), torch.linalg.solve(gram, right), rtol=1e-6, atol=1e-9)
    lower = torch.linalg.cholesky(gram)
    torch.testing.assert_close(lower @ forward(lower, right), right, rtol=1e-6, atol=1e-9)
    assert torch.equal(gram, given[0])
    assert torch.equal(right, given[1])


def test_pauses_come_between_the_blocks() -> None:
    pauses: list[int] = []
    solved(definite(300), torch.ones(300, 2, dtype=torch.double), lambda: pauses.append(1))
    assert len(pauses) == 6 + 3 + 3


def test_what_is_not_definite_is_refused() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        factored(-definite(200))
