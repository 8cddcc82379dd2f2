"""Row lists: 4-dimensional ``slash_words`` give every query block its own set of key blocks (general kernels)."""

import pytest
import torch
from torch import Tensor

from megatron_mtraining import Documents
from megatron_mtraining.bitmap import pack_bits
from megatron_mtraining.ops import native
from tests.gpu.helpers import (
    Case,
    assert_as_good_as_sdpa,
    kernels,
    mixed_qkv,
    random_index,
    run_oracle,
    run_sdpa,
)

pytestmark = pytest.mark.gpu
PACKED = Documents(1024, (0, 1, 5, 12), (64, 256, 448, 256))
CASES = {
    "plain": Case(),
    "d64-fp16": Case(dim=64, dtype=torch.float16, heads=9, kv_heads=3),
    "striped": Case(cp_size=4, batch=2),
    "zigzag-documents": Case(cp_size=4, layout="zigzag", documents=PACKED, heads=16, kv_heads=2),
    "more-than-a-word": Case(seq_len=4608, heads=2, kv_heads=1, cp_size=2),
    "one-block": Case(seq_len=64),
}


def doc_start(case: Case) -> Tensor:
    return (case.documents or Documents.single(case.seq_len)).doc_start.cuda()


def random_lists(case: Case) -> Tensor:
    """Bool ``[batch, heads, n, n]``, a third of all blocks, the diagonal for sure; the future and other documents too."""
    blocks = case.seq_len // 64
    kept = torch.rand(case.batch, case.heads, blocks, blocks, device="cuda") < 0.3
    return kept | torch.eye(blocks, dtype=torch.bool, device="cuda")


def token_mask(case: Case, kept: Tensor) -> Tensor:
    """Bool ``[batch, heads, seq, seq]`` of the contract: earlier blocks of the same document, the lower triangle."""
    start = doc_start(case)
    kept = kept & (start[:, None] == start[None, :])
    mask = kept.repeat_interleave(64, -1).repeat_interleave(64, -2)
    return mask & torch.ones(case.seq_len, case.seq_len, dtype=torch.bool, device="cuda").tril()


def attend(
    case: Case, words: Tensor, qkv: tuple[Tensor, ...], dout: Tensor, arch: int, per_launch: int
) -> dict[str, Tensor]:
    """All virtual ranks, ``per_launch`` chunks a launch, every output poisoned with NaN first.

    ``words``: ``[batch, heads, n, words]`` row lists, or the ``[batch, heads, words]`` of an index.
    """
    native.load()
    ops = torch.ops.megatron_mtraining
    layout, size, scale = case.make_layout(), case.cp_size, case.dim**-0.5
    table, start = layout.table("cuda"), doc_start(case)
    shards = [[layout.shard(x, rank) for rank in range(size)] for x in (*qkv, dout)]
    k, v = (torch.stack(x) for x in shards[1:3])
    dk, dv = (torch.zeros(x.shape, device="cuda") for x in (k, v))
    found: list[list[Tensor]] = []
    parts = [slice(first, min(first + per_launch, size)) for first in range(0, size, per_launch)]
    for rank in range(size):
        q, grad = shards[0][rank], shards[3][rank]
        rows = words[:, :, table[rank].long()].contiguous() if words.dim() == 4 else words
        lines = (rows, start, table[rank])
        nothing = (None, None, None)
        lse = torch.full((case.batch, case.heads, q.shape[1]), float("nan"), device="cuda")
        out, partial = torch.full_like(q, float("nan")), torch.full(q.shape, float("nan"), device="cuda")
        for number, part in enumerate(parts):
            final = out if number + 1 == len(parts) else None
            ops.attention_forward_(
                q, k[part], v[part], *lines, table[part], *nothing, scale, number > 0, arch, partial, final, lse
            )
        delta = ops.attention_delta(out, grad)
        dq = torch.full(q.shape, float("nan"), device="cuda")
        for number, part in enumerate(parts):
            grads = [torch.full_like(x[part], float("nan")) for x in (dk, dv)]
            ops.attention_backward_(
                q, k[part], v[part], grad, lse, delta, *lines, table[part], scale, number > 0, True, arch, dq, *grads
            )
            dk[part] += grads[0]
            dv[part] += grads[1]
        found.append([out, lse.transpose(1, 2), dq])
    out, lse, dq = (layout.unshard(x) for x in zip(*found, strict=True))
    dk, dv = (layout.unshard(list(x)) for x in (dk, dv))
    return {"out": out, "lse": lse.transpose(1, 2), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("per_launch", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_row_lists_against_oracle(name: str, per_launch: int) -> None:
    case = CASES[name]
    kept, qkv = random_lists(case), mixed_qkv(case)
    dout, mask = torch.randn_like(qkv[0]), token_mask(case, kept)
    ours = attend(case, pack_bits(kept), qkv, dout, 0, per_launch)
    assert_as_good_as_sdpa(ours, run_sdpa(qkv, mask, dout), run_oracle(qkv, mask, dout), name)


@pytest.mark.skipif("sm80" not in kernels(), reason="the general kernels are not built")
def test_row_lists_of_an_index_give_the_bits_of_the_index() -> None:
    """The same tiles in the same order: written out row by row, an index attends and differentiates bit by bit alike."""
    case = Case(cp_size=4, documents=PACKED, vertical=0)
    index, qkv = random_index(case), mixed_qkv(case)
    dout = torch.randn_like(qkv[0])
    blocks = torch.arange(case.seq_len // 64, device="cuda")
    start = doc_start(case).long()
    line = (start[:, None] + blocks[:, None] - blocks[None, :]).clamp(0, blocks.numel() - 1)
    lists = pack_bits(index.slash_bits()[:, :, line])  # what lies outside a document must not matter
    expected = attend(case, index.slash_words, qkv, dout, 80, 4)
    for name, x in attend(case, lists, qkv, dout, 80, 4).items():
        assert torch.equal(x, expected[name]), name


def test_row_lists_in_every_run_the_same() -> None:
    case = Case(seq_len=2048, heads=8, cp_size=2)
    kept, qkv = random_lists(case), mixed_qkv(case)
    words, dout = pack_bits(kept), torch.randn_like(qkv[0])
    first = attend(case, words, qkv, dout, 0, 2)
    for _ in range(29):
        for name, x in attend(case, words, qkv, dout, 0, 2).items():
            assert torch.equal(x, first[name]), name


def test_row_lists_are_refused_by_name() -> None:
    case = Case(seq_len=128)
    qkv = mixed_qkv(case)
    words, dout = pack_bits(random_lists(case)), torch.randn_like(qkv[0])
    with pytest.raises(RuntimeError, match=r"slash_words has 4 dimensions \(row lists\), which arch=90 does not serve"):
        attend(case, words, qkv, dout, 90, 1)
    with pytest.raises(RuntimeError, match="slash_words has shape"):
        attend(case, words[..., :0], qkv, dout, 0, 1)
    native.load()
    q, k, v = qkv
    table = torch.arange(2, dtype=torch.int32, device="cuda")
    columns = torch.full((1, case.heads, 64), -1, dtype=torch.int32, device="cuda")
    compact = torch.zeros(1, case.heads, 64, case.dim, device="cuda", dtype=q.dtype)
    lse = torch.empty(1, case.heads, 128, device="cuda")
    with pytest.raises(RuntimeError, match="row lists\\), which take no columns"):
        torch.ops.megatron_mtraining.attention_forward_(
            q, k[None], v[None], words, doc_start(case), table, table[None], compact, compact, columns, 0.1, False, 0,
            None, torch.empty_like(q), lse,
        )  # fmt: skip
