"""A tensor-parallel MLP on the host backend, with NumPy: y = x + gelu(x W1^T + b1) W2^T.

It starts itself as four ranks, unless a launcher has done so::

    python python/examples/mlp.py
    mpirun -np 4 python python/examples/mlp.py

Each rank has the rows of some tokens, and a part of the hidden features. The first layer gathers the tokens' rows while
it multiplies; the second sums the ranks' products, and each rank gets the rows of its own tokens. On GPUs only the
backend's name and the arrays differ: write backend="cuda", and give tensors of PyTorch.
"""

import math

import numpy as np

import gemmesh

TOKENS, MODEL, HIDDEN = 256, 512, 2048
HALF = np.float16


def parameters() -> dict[str, np.ndarray]:
    """The same random numbers on all ranks. Weights are [N, K], as linear layers store them."""
    random = np.random.default_rng(0)
    shapes = {"x": (TOKENS, MODEL), "w1": (HIDDEN, MODEL), "b1": (HIDDEN,), "w2": (MODEL, HIDDEN)}
    return {name: (random.standard_normal(shape) / math.sqrt(shape[-1])).astype(HALF) for name, shape in shapes.items()}


def mlp(group: gemmesh.Group, x: gemmesh.Sharded, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray) -> gemmesh.Matrix:
    """This rank's rows of the result."""
    hidden = group.all_gather_matmul(x, w1, bias=b1, activation="gelu")
    return group.matmul_reduce_scatter(hidden, w2, residual=x.shard)


def exact(x: np.ndarray, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray) -> np.ndarray:
    """The MLP in float64, on one rank."""
    x, w1, b1, w2 = (values.astype(np.float64) for values in (x, w1, b1, w2))
    hidden = x @ w1.T + b1
    return x + hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2 @ w2.T


def main() -> None:
    if not gemmesh.is_rank():
        return gemmesh.launch(4)
    with gemmesh.Group.from_env(backend="host") as group:
        of_all = parameters()
        x = group.sharded(TOKENS, MODEL, HALF)
        own = slice(x.rows.start, x.rows.stop)
        x.copy_from(of_all["x"][own])
        # This rank's hidden features.
        part = np.array_split(np.arange(HIDDEN), group.world_size)[group.rank]
        w1, b1, w2 = of_all["w1"][part], of_all["b1"][part], np.ascontiguousarray(of_all["w2"][:, part])

        y = np.from_dlpack(mlp(group, x, w1, b1, w2))

        error = np.abs(y - exact(**of_all)[own]).max()
        # The result, the hidden values and each rank's part of a sum are rounded to f16.
        assert error < 3e-4, f"rank {group.rank}: the error is {error}"
        print(f"rank {group.rank} of {group.world_size}: tokens {own.start} to {own.stop - 1}, error {error:.1e}")
        group.barrier()


if __name__ == "__main__":
    main()
