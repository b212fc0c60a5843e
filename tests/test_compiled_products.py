"""Products that are written as loops for a compiler: of weights, and of keys and values as they are."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from kernels.plain import TILE, dot, mix
from models.linear import FEW_ROWS, Linear

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request) -> torch.dtype:
    torch._dynamo.reset()
    return request.param


def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


def test_few_rows_of_activations(dtype):
    layer = Linear(72, 40, dtype=dtype).requires_grad_(False)
    layer.weight.normal_()
    layer.bias.normal_()
    run = compiled(layer)
    for rows in (1, 3, FEW_ROWS[dtype] + 1):
        x = torch.randn(rows, 1, 72, dtype=dtype)
        want = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        y = run(x)
        assert y.dtype == dtype
        assert_close(y.double(), want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=5e-2)


@pytest.mark.parametrize("n", [5, 2 * TILE + 3])
def test_one_query_with_keys_and_values(dtype, n):
    q, weights = torch.randn(2, 2, 3, 16), torch.rand(2, 2, 3, n)
    x = torch.randn(2, 2, n, 16).to(dtype)
    assert_close(compiled(dot)(q, x), dot(q, x))
    assert_close(compiled(mix)(weights, x), mix(weights, x))
    assert_close(mix(weights, x), torch.einsum("bhgn,bhnd->bhgd", weights, x.float()))
