"""Problems, baselines and comparisons of the GPU tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_mtraining import Documents, Layout, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.config import BLOCK
from megatron_mtraining.ops import native
from megatron_mtraining.testing import oracle, run_virtual

NAMES = ("out", "lse", "dq", "dk", "dv")


def kernels() -> list[str]:
    """The native kernels that this library and this device have; none without a GPU (the tests are skipped then)."""
    if not torch.cuda.is_available():
        return ["sm80"]
    major = torch.cuda.get_device_capability()[0]
    built = native.load().architectures
    return [f"sm{arch}" for arch in built if (major >= 8 if arch == 80 else major == 9)]


@dataclass(frozen=True)
class Case:
    """A problem of one attention call.

    Attributes:
        scale_up: factor on the queries: large logits.
        spikes: rows and columns that stick out by a factor of 20.
        slash, vertical: kept lines per head besides the diagonal.
    """

    seq_len: int = 1024
    heads: int = 4
    kv_heads: int = 2
    dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    cp_size: int = 1
    inner_size: int | None = None
    layout: str = "striped"
    documents: Documents | None = None
    scale_up: float = 1.0
    spikes: int = 0
    slash: int = 4
    vertical: int = 60
    config: dict[str, object] = field(default_factory=dict)

    def make_layout(self) -> Layout:
        """The layout of the virtual ranks."""
        return getattr(Layout, self.layout)(self.seq_len, self.cp_size)


def mixed_qkv(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as strided views of one fused tensor, in Megatron's memory order ``[seq, batch, heads, dim]``."""
    total = case.heads + 2 * case.kv_heads
    mixed = torch.randn(case.seq_len, case.batch, total, case.dim, device="cuda").transpose(0, 1)
    mixed[:, :, : case.heads] *= case.scale_up
    for _ in range(case.spikes):
        mixed[:, random.randrange(case.seq_len), random.randrange(total)] *= 20
    mixed = mixed.to(case.dtype)
    q, k, v = mixed.split((case.heads, case.kv_heads, case.kv_heads), dim=2)
    return q, k, v


def random_index(case: Case) -> VerticalSlashIndex:
    """Random lines, others in every head and sample, and none at all in the last head."""
    blocks = -(-case.seq_len // BLOCK)
    lines = [
        [
            (
                random.sample(range(blocks), min(case.slash, blocks)) if head + 1 < case.heads else [],
                random.sample(range(case.seq_len), min(case.vertical, case.seq_len)) if head + 1 < case.heads else [],
            )
            for head in range(case.heads)
        ]
        for _ in range(case.batch)
    ]
    return VerticalSlashIndex.from_lines(
        [[s for s, _ in sample] for sample in lines],
        [[v for _, v in sample] for sample in lines],
        seq_len=case.seq_len,
        documents=case.documents,
        device="cuda",
    )


def run_ours(
    case: Case, kernel: str, index: VerticalSlashIndex, qkv: Sequence[Tensor], dout: Tensor
) -> dict[str, Tensor]:
    """out, lse and gradients of all virtual ranks, by the given kernel."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    config = MTrainingConfig(kernel=kernel, **case.config)  # type: ignore[arg-type]
    out, aux = run_virtual(
        *leaves, layout=case.make_layout(), config=config, inner_size=case.inner_size, index=index, return_aux=True
    )
    grads = torch.autograd.grad(out, leaves, dout)
    return dict(zip(NAMES, (out.detach(), aux.lse, *grads), strict=True))


def run_oracle(qkv: Sequence[Tensor], mask: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The same in fp64 by dense attention under the mask."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    out, lse = oracle(leaves[0], leaves[1], leaves[2], mask)
    grads = torch.autograd.grad(out, leaves, dout.double())
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def run_sdpa(qkv: Sequence[Tensor], mask: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """The same by PyTorch SDPA in the input type (no lse)."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def errors(x: Tensor, reference: Tensor) -> tuple[float, float]:
    """(largest error, root of the sum of squared errors)."""
    difference = x.double() - reference
    return float(difference.abs().max()), float(difference.norm())


def assert_as_good_as_sdpa(
    ours: dict[str, Tensor], sdpa: dict[str, Tensor], truth: dict[str, Tensor], what: str = ""
) -> None:
    """Twice the error of SDPA, tensor by tensor, in the largest and in the mean error; lse to fp32 accuracy."""
    for name, x in ours.items():
        assert torch.isfinite(x).all(), f"{what} {name} is not finite"
        if name == "lse":
            largest = float(truth[name].abs().max())
            assert errors(x, truth[name])[0] <= 2e-3 + 1e-5 * largest, f"{what} lse: {errors(x, truth[name])[0]:.2e}"
            continue
        found, allowed = errors(x, truth[name]), errors(sdpa[name], truth[name])
        assert found[0] <= 2 * allowed[0] + 1e-5, f"{what} {name}: largest error {found[0]:.3e}, SDPA {allowed[0]:.3e}"
        assert found[1] <= 2 * allowed[1] + 1e-5, f"{what} {name}: error norm {found[1]:.3e}, SDPA {allowed[1]:.3e}"
