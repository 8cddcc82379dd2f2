"""Index policies on a GPU: the pairs that they keep on the CPU, no synchronisation with the host, bounded memory."""

import pytest
import torch

from benchmarks.structured import structured_tensors
from megatron_mtraining import MTrainingConfig, estimate_index, mtraining_attention
from megatron_mtraining.config import INDEX_POLICIES
from megatron_mtraining.testing import oracle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", INDEX_POLICIES)
def test_keeps_what_it_keeps_on_the_cpu(policy: str) -> None:
    """Scores differ in their last bits (tensor cores), so that a line at the edge of the share may flip."""
    tensors = structured_tensors(4096, 4, 2, 128, "cpu")
    config = MTrainingConfig(index_policy=policy, top_p=0.8, fixed_slash=8, moba_top_k=3)
    on_cpu = estimate_index(*tensors[:2], config=config).to_mask()
    q, k, v, dout = (x.cuda() for x in tensors)
    index = estimate_index(q, k, config=config)
    assert (index.to_mask().cpu() ^ on_cpu).sum() < 0.02 * on_cpu.sum()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = mtraining_attention(q, k, v, config=config, index=index)
    expected, _ = oracle(q, k, v, index.to_mask())
    for found, reference in zip(
        (out, *torch.autograd.grad(out, (q, k, v), dout)),
        (expected, *torch.autograd.grad(expected, (q, k, v), dout.double())),
        strict=True,
    ):
        assert (found.double() - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("policy", INDEX_POLICIES)
def test_no_synchronisation_and_no_large_temporaries(policy: str) -> None:
    q, k, v, dout = structured_tensors(32768, 16, 2, 128, "cuda")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    config = MTrainingConfig(index_policy=policy)

    def step() -> None:
        torch.autograd.grad(mtraining_attention(q, k, v, config=config), (q, k, v), dout)

    step()  # copies the tables to the device once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    estimate_index(q, k, config=config)
    # A fp64 copy of q alone would be 512 MiB, a score of every pair of tokens 128 GiB.
    most = 1024 if policy == "xattention" else 480
    assert torch.cuda.max_memory_allocated() - before < most * 2**20
