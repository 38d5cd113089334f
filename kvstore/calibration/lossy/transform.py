"""The basis in which a part is coded: the Karhunen-Loeve transform of the residual, scaled by what an error costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvstore.codecs.predictive.lossy_rows import synthesis_of

Arrays = dict[str, np.ndarray[Any, Any]]
Tensor = torch.Tensor
RIDGE_COST = 1e-2  # of a cost's own diagonal that is added to it


def fit_transform(
    covariance: np.ndarray[Any, Any], cost: np.ndarray[Any, Any], prefix: str, arrays: Arrays
) -> np.ndarray[Any, Any]:
    """Makes the basis; returns the components' standard deviations [C], in units of cost."""
    factor = factor_of(cost)
    vectors = np.linalg.eigh(factor.T @ covariance @ factor)[1][:, ::-1]
    synthesis = np.linalg.solve(factor.T, vectors).T  # vectors.T @ inverse of factor
    unit = np.sqrt(np.square(synthesis).mean(0))
    component = np.abs(synthesis / unit).max(1) / 127
    arrays[prefix + "basis"] = np.rint(synthesis / unit / component[:, None]).astype(np.int8)
    arrays[prefix + "unit"], arrays[prefix + "component"] = unit.astype(np.float32), component.astype(np.float32)
    analysis = matrices(arrays, prefix)[0].double().numpy()
    found: np.ndarray[Any, Any] = np.sqrt(np.maximum((analysis * (covariance @ analysis)).sum(0), 1e-30))
    return found


def factor_of(cost: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Lower triangular [C, C]: an error e costs the square of e @ factor."""
    diagonal = np.maximum(cost.diagonal(), 1e-12 * cost.diagonal().max())
    found: np.ndarray[Any, Any] = np.linalg.cholesky(cost + RIDGE_COST * np.diag(diagonal))
    return found


def matrices(arrays: Arrays, prefix: str) -> tuple[Tensor, Tensor]:
    """(analysis, synthesis), float32."""
    synthesis = synthesis_of(*(arrays[prefix + name] for name in ("component", "basis", "unit")))
    return torch.from_numpy(np.linalg.inv(synthesis)).float(), torch.from_numpy(synthesis).float()
