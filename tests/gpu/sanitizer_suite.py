"""Every operator on tiny shapes, for the checkers of the CUDA toolkit: they judge, this only runs the kernels.

compute-sanitizer --tool racecheck python -m tests.gpu.sanitizer_suite [sm80 sm90]
"""

import sys

import torch

from megatron_mtraining import Documents, MTrainingConfig, VerticalSlashIndex
from megatron_mtraining.bitmap import pack_bits
from megatron_mtraining.testing import run_virtual
from tests.gpu.helpers import Case, kernels, mixed_qkv, random_index, run_ours
from tests.gpu.test_row_lists import attend, random_lists

PACKED = Documents(512, (0, 1, 5), (64, 230, 192))
CASES = {
    "one block": Case(seq_len=64, heads=2, kv_heads=1, slash=1, vertical=10),
    "ragged": Case(seq_len=100, heads=2, kv_heads=1, slash=1, vertical=10),
    "ring": Case(seq_len=256, heads=3, kv_heads=1, cp_size=2, slash=2, vertical=90),
    "d64 fp16": Case(seq_len=256, heads=2, kv_heads=2, dim=64, dtype=torch.float16, slash=2, vertical=70),
    "d64 gqa": Case(seq_len=256, heads=6, kv_heads=2, dim=64, slash=2, vertical=70),
    "documents": Case(seq_len=512, heads=2, kv_heads=1, batch=2, cp_size=4, documents=PACKED, slash=3, vertical=70),
    "pieces": Case(seq_len=256, heads=2, kv_heads=1, cp_size=2, vertical=200, config={"max_compact_columns": 64}),
}


def attention(kernel: str) -> None:
    """Forward and backward under random indices."""
    for case in CASES.values():
        index, qkv = random_index(case), mixed_qkv(case)
        run_ours(case, kernel, index, qkv, torch.randn_like(qkv[0]))


def extreme_lines(kernel: str) -> None:
    """No columns, no distances, the farthest distance alone, everything (cases D3)."""
    case = Case(seq_len=256, heads=2, kv_heads=1)
    every = list(range(case.seq_len))
    for slash, vertical in (([3], []), ([], [5, 100]), ([3], every), ([], every), ([0, 1, 2, 3], every)):
        index = VerticalSlashIndex.from_lines([[slash] * 2], [[vertical] * 2], seq_len=case.seq_len, device="cuda")
        qkv = mixed_qkv(case)
        run_ours(case, kernel, index, qkv, torch.randn_like(qkv[0]))


def estimation(kernel: str) -> None:
    """Index estimation, capped and not, one document and several, then attention."""
    for cp_size, documents in ((1, None), (1, PACKED), (2, None), (2, PACKED)):
        for cap in (None, 20):
            case = Case(seq_len=512, heads=4, kv_heads=2, cp_size=cp_size, batch=2, documents=documents)
            config = MTrainingConfig(kernel=kernel, top_p=0.8, max_vertical=cap, max_slash=None if cap is None else 3)
            leaves = [x.detach().requires_grad_() for x in mixed_qkv(case)]
            out = run_virtual(*leaves, layout=case.make_layout(), config=config, documents=documents)
            torch.autograd.grad(out, leaves, torch.randn_like(out))


def row_lists() -> None:
    """4-dimensional slash words."""
    case = Case(seq_len=256, heads=4, kv_heads=2, cp_size=2)
    qkv = mixed_qkv(case)
    attend(case, pack_bits(random_lists(case)), qkv, torch.randn_like(qkv[0]), 0, 1)


def main() -> None:
    """Runs everything once, with the kernels named on the command line (default: all that run here)."""
    torch.manual_seed(0)
    names = sys.argv[1:] or kernels()
    for kernel in names:
        attention(kernel)
        extreme_lines(kernel)
        estimation(kernel)
        print(f"{kernel}: done", flush=True)
    if "sm80" in names:  # the general kernels alone serve them
        row_lists()
    torch.cuda.synchronize()
    print("all operators ran")


if __name__ == "__main__":
    main()
