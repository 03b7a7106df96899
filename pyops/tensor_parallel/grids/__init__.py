"""Layers on grids of ranks in two, two and a half and three dimensions, which cut every tensor,
activations included.

    grid = Grid.of(tp_group, mode="2d")                        # q x q ranks
    layer = GridLinear(512, 2048, grid=grid)
    y = layer(grid.take(x))                                    # blocks of x and y

line: what the ranks along an axis send one another. grid: who holds what. products: A B, A B^T and
A^T B over blocks; steps: the same block by block. linear, norm, attention, mlp, dropout and
vocabulary: layers over them, whose parameters have the names of those in one dimension. costs:
bytes, messages and memory of each layout beside tensor parallelism in one dimension and ZeRO.
"""

from __future__ import annotations

from typing import Any

from pyops.renamed import missing_attribute
from pyops.tensor_parallel.grids.attention import GridAttention
from pyops.tensor_parallel.grids.dropout import GridDropout
from pyops.tensor_parallel.grids.grid import MODES, Cuts, Grid, grid_shape
from pyops.tensor_parallel.grids.line import Line, Traffic
from pyops.tensor_parallel.grids.linear import (
    GridLinear,
    GridLinearConfig,
    GridResidual,
    GridSequential,
)
from pyops.tensor_parallel.grids.mlp import GridMLP
from pyops.tensor_parallel.grids.norm import GridLayerNorm, GridRMSNorm
from pyops.tensor_parallel.grids.products import product
from pyops.tensor_parallel.grids.vocabulary import GridEmbedding, GridHead, GridRows

__all__ = [
    "MODES",
    "Cuts",
    "Grid",
    "GridAttention",
    "GridDropout",
    "GridEmbedding",
    "GridHead",
    "GridLayerNorm",
    "GridLinear",
    "GridLinearConfig",
    "GridMLP",
    "GridRMSNorm",
    "GridResidual",
    "GridRows",
    "GridSequential",
    "Line",
    "Traffic",
    "grid_shape",
    "product",
]


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
