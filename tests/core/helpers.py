"""What the core tests share."""

import random
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_mtraining import Documents, VerticalSlashIndex
from megatron_mtraining.testing import oracle

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


def refusal(
    main: Callable[[], object],
    words: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """The last line that a command prints when it ends because of these options."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err.splitlines()[-1]


def random_qkv(
    seq_len: int, heads: int = 4, kv_heads: int = 2, dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v that require gradients."""
    q, k, v = (
        torch.randn(batch, seq_len, h, dim, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def random_index(
    seq_len: int, heads: int, batch: int = 1, slash: int = 3, vertical: int = 40, documents: Documents | None = None
) -> VerticalSlashIndex:
    """Random lines, others in every head."""
    blocks = -(-seq_len // 64)
    lines = [
        [
            (random.sample(range(blocks), min(slash, blocks)), random.sample(range(seq_len), min(vertical, seq_len)))
            for _ in range(heads)
        ]
        for _ in range(batch)
    ]
    return VerticalSlashIndex.from_lines(
        [[s for s, _ in sample] for sample in lines],
        [[v for _, v in sample] for sample in lines],
        seq_len=seq_len,
        documents=documents,
    )


def relative_error(x: Tensor, reference: Tensor) -> float:
    """``max |x - reference|`` over the largest entry of the reference (at least 1e-3: a gradient may be exactly 0)."""
    x, reference = x.detach().double(), reference.detach().double()
    return float((x - reference).abs().max() / reference.abs().max().clamp(min=1e-3))


def oracle_results(inputs: Sequence[Tensor], mask: Tensor, dout: Tensor) -> list[Tensor]:
    """``[out, lse, dq, dk, dv]`` of the oracle, fp64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    out, lse = oracle(leaves[0], leaves[1], leaves[2], mask)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def assert_close(results: Sequence[Tensor], references: Sequence[Tensor], bound: float) -> None:
    """Compares ``[out, lse, dq, dk, dv]`` one by one."""
    for name, x, reference in zip(("out", "lse", "dq", "dk", "dv"), results, references, strict=True):
        assert torch.isfinite(x).all(), f"{name} is not finite"
        error = relative_error(x, reference)
        assert error <= bound, f"{name}: relative error {error:.2e} > {bound:.0e}"
