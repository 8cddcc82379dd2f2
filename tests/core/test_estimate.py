"""The estimated index against a plain construction from the definitions, and its bits over ranks and layouts."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from megatron_mtraining import Documents, Layout, MTrainingConfig, VerticalSlashIndex, estimate_index
from megatron_mtraining.testing import estimate_virtual

from .helpers import random_qkv
from .test_select import by_sorting


def peaked(seq_len: int, heads: int = 4, kv_heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.float64):
    """q and k whose attention is sparse: recent keys, some loud columns, and for some heads one distance."""
    generator = torch.Generator().manual_seed(seq_len)
    q, k = (torch.randn(1, seq_len, h, dim, generator=generator, dtype=torch.float64) for h in (heads, kv_heads))
    q += 2.0
    loud = torch.randperm(seq_len, generator=generator)[: seq_len // 40]
    k[:, loud] += 0.25 + 0.5 * torch.rand(loud.numel(), 1, 1, generator=generator, dtype=torch.float64)
    turn = torch.arange(seq_len, dtype=torch.float64) / 300
    q[..., 0], q[..., 1] = 30 * turn.cos()[None, :, None], 30 * turn.sin()[None, :, None]
    k[..., 0], k[..., 1] = turn.cos()[None, :, None], turn.sin()[None, :, None]
    return q.to(dtype), k.to(dtype)


def plain_index(
    q: torch.Tensor, k: torch.Tensor, config: MTrainingConfig, start: int, length: int
) -> list[tuple[set[int], set[int]]]:
    """(distances, columns) of each head of sample 0 for the document at ``[start, start + length)``, term by term."""
    result = []
    group = q.shape[2] // k.shape[2]
    rows = range(max(0, length - config.last_q), length)
    last_block = (length - 1) // 64
    for head in range(q.shape[2]):
        scores = q[0, start : start + length, head].double() @ k[0, start : start + length, head // group].double().T
        scores = scores * q.shape[-1] ** -0.5
        column_mass, slash_mass = [0] * length, [0] * (last_block + 1)
        for row in rows:
            line = scores[row, : row + 1]
            weights = [round(x * 2**32) for x in torch.exp(line - line.max()).tolist()]
            total = sum(weights)
            for column, weight in enumerate(weights):
                mass = round(weight * (2**32 / total))
                column_mass[column] += mass
                slash_mass[row // 64 - column // 64] += mass
        candidates = last_block * 64
        columns = by_sorting(
            column_mass[:candidates], list(range(candidates)), config.vertical_share, config.max_vertical
        )
        ties = [-d for d in range(last_block + 1)]
        distances = by_sorting(slash_mass, ties, config.slash_share, config.max_slash)
        distances |= set(range(min(config.local_blocks, last_block + 1)))
        columns |= set(range(min(config.sink_tokens, length)))
        result.append((distances, {start + c for c in columns}))
    return result


def lines_of(index: VerticalSlashIndex, head: int, start: int, blocks: int) -> tuple[set[int], set[int]]:
    distances = index.slash_bits()[0, head, start // 64 : start // 64 + blocks].nonzero().flatten().tolist()
    columns = index.column_bits()[0, head].nonzero().flatten().tolist()
    return set(distances), {c for c in columns if start <= c < start + blocks * 64}


CONFIGS = [
    MTrainingConfig(top_p=0.9),
    MTrainingConfig(top_p=0.5, slash_top_p=0.95, last_q=128),
    MTrainingConfig(top_p=0.95, last_q=192, max_vertical=20, max_slash=3),
    MTrainingConfig(top_p=0.6, local_blocks=3, sink_tokens=5, max_vertical=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("seq_len", [2048, 2000, 2049])
def test_index_is_the_definition(config: MTrainingConfig, seq_len: int) -> None:
    q, k = peaked(seq_len)
    index = estimate_index(q, k, config=config)
    expected = plain_index(q, k, config, 0, seq_len)
    sizes = []
    for head, (distances, columns) in enumerate(expected):
        found = lines_of(index, head, 0, index.num_blocks)
        assert found == (distances, columns), f"head {head}"
        sizes.append(len(distances))
    assert float(index.density()) < 0.9, "the case is meant to be sparse"
    assert min(sizes) >= 1


def union_of_segments(
    q: torch.Tensor, k: torch.Tensor, config: MTrainingConfig, start: int, ends: list[int]
) -> list[tuple[set[int], set[int]]]:
    """Lines that the document's beginning up to any of ``ends`` would keep by itself."""
    parts = [plain_index(q, k, config, start, end) for end in ends]
    return [
        (set().union(*(part[head][0] for part in parts)), set().union(*(part[head][1] for part in parts)))
        for head in range(q.shape[2])
    ]


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (MTrainingConfig(top_p=0.6, probe_segments=4), [2049, 1536, 1024, 512]),
        (MTrainingConfig(top_p=0.5, slash_top_p=0.8, last_q=128, probe_segments=3), [2049, 1344, 640]),
        (MTrainingConfig(top_p=0.7, probe_segments=2, max_vertical=20, max_slash=3, sink_tokens=2), [2049, 1024]),
        (MTrainingConfig(top_p=0.3, last_q=1024, probe_segments=8), [2049, 1024]),  # no part is shorter than its probe
    ],
)
def test_segments_keep_what_any_of_them_needs(config: MTrainingConfig, ends: list[int]) -> None:
    q, k = peaked(2049)
    index = estimate_index(q, k, config=config)
    one = estimate_index(q, k, config=replace(config, probe_segments=1))
    for head, expected in enumerate(union_of_segments(q, k, config, 0, ends)):
        assert lines_of(index, head, 0, index.num_blocks) == expected, f"head {head}"
    assert float(one.density()) < float(index.density()) < 0.95, "the case is meant to be sparse, the union larger"
    most = config.max_vertical
    assert most is None or index.column_capacity == min(len(ends) * most + config.sink_tokens, index.num_blocks * 64)


@pytest.mark.parametrize("cap", [None, 700])
def test_segments_add_nothing_to_every_line(cap: int | None) -> None:
    q, k = peaked(2048)
    config = MTrainingConfig(top_p=1, max_vertical=cap, max_slash=None if cap is None else 20)
    one, several = (estimate_index(q, k, config=replace(config, probe_segments=count)) for count in (1, 4))
    assert torch.equal(one.slash_words, several.slash_words) and torch.equal(one.column_words, several.column_words)


def test_segments_of_documents() -> None:
    """Documents have as many segments as fit; the index has the same bits on every rank and layout."""
    config = MTrainingConfig(top_p=0.6, probe_segments=3)
    documents = Documents.from_cu_seqlens([0, 700, 730, 1900], 2048, [0, 704, 768, 2048])
    ends = {0: [700, 448, 192], 704: [30], 768: [1170, 768, 384]}
    q, k = peaked(2048)
    for layout in (
        Layout.striped(2048, 1),
        Layout.striped(2048, 4),
        Layout.zigzag(2048, 2),
        Layout.contiguous(2048, 8),
    ):
        index = estimate_virtual(q, k, layout=layout, config=config, documents=documents, check_same=True)
        for start, span in zip(ends, documents.spans, strict=True):
            for head, expected in enumerate(union_of_segments(q, k, config, start, ends[start])):
                assert lines_of(index, head, start, span) == expected, (layout, start, head)


def test_a_column_that_only_the_middle_needs_is_kept() -> None:
    q, k = torch.zeros(1, 2048, 1, 64), torch.zeros(1, 2048, 1, 64)
    q[:, 960:1024, :, 0] = 100.0
    k[:, 300, :, 0] = 100.0
    config = MTrainingConfig(top_p=0.3, max_vertical=8)
    assert not estimate_index(q, k, config=config).column_bits()[0, 0, 300]
    found = estimate_index(q, k, config=replace(config, probe_segments=2))
    assert found.column_bits()[0, 0, 300] and found.slash_bits()[0, 0, 15 - 300 // 64]


def test_documents_have_their_own_lines() -> None:
    config = MTrainingConfig(top_p=0.8, last_q=64)
    documents = Documents.from_cu_seqlens([0, 700, 730, 1900], 2048, [0, 704, 768, 2048])
    q, k = peaked(2048)
    for layout in (Layout.striped(2048, 1), Layout.striped(2048, 4), Layout.zigzag(2048, 2)):
        index = estimate_virtual(q, k, layout=layout, config=config, documents=documents, check_same=True)
        for start, length, span in zip((0, 704, 768), documents.lengths, documents.spans, strict=True):
            expected = plain_index(q, k, config, start, length)
            for head in range(4):
                assert lines_of(index, head, start, span) == expected[head]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("last_q", "segments"), [(64, 1), (192, 1), (64, 4)])
def test_same_bits_for_every_layout_and_number_of_ranks(dtype: torch.dtype, last_q: int, segments: int) -> None:
    q, k = peaked(2048, dtype=dtype)
    top_p = 0.93 if segments == 1 else 0.7
    config = MTrainingConfig(top_p=top_p, last_q=last_q, max_vertical=300, probe_segments=segments)
    first = estimate_index(q, k, config=config)
    assert int(first.column_bits().sum()) > 0 and float(first.density()) < 0.95
    for cp_size in (2, 4, 8):
        for layout in (
            Layout.striped(2048, cp_size),
            Layout.striped(2048, cp_size, 128),
            Layout.zigzag(2048, cp_size),
            Layout.contiguous(2048, cp_size),
        ):
            index = estimate_virtual(q, k, layout=layout, config=config, check_same=True)
            assert torch.equal(index.slash_words, first.slash_words), layout
            assert torch.equal(index.column_words, first.column_words), layout


def test_strides_do_not_change_the_bits() -> None:
    q, k = peaked(1024, dtype=torch.float32)
    mixed = torch.cat([q, k, k], 2)
    views = mixed[:, :, :4], mixed[:, :, 4:6]
    a, b = estimate_index(q, k), estimate_index(*views)
    assert torch.equal(a.slash_words, b.slash_words) and torch.equal(a.column_words, b.column_words)


def test_one_line_with_all_the_mass_is_kept() -> None:
    q = torch.zeros(1, 1024, 1, 64)
    k = torch.zeros(1, 1024, 1, 64)
    q[..., 0] = 100.0
    k[:, 300, :, 0] = 100.0
    index = estimate_index(q, k, config=MTrainingConfig(top_p=0.3))
    assert index.column_bits()[0, 0].nonzero().flatten().tolist() == [300]
    assert index.slash_bits()[0, 0].nonzero().flatten().tolist() == [0, 15 - 300 // 64]


def test_ties_are_kept_together() -> None:
    # Equal keys: every column has the same mass, so the line that crosses p brings all of them.
    q, k = torch.randn(1, 1024, 2, 64), torch.ones(1, 1024, 1, 64)
    index = estimate_index(q, k, config=MTrainingConfig(top_p=0.5, max_vertical=None))
    assert index.column_bits()[..., : 15 * 64].all() and not index.column_bits()[..., 15 * 64 :].any()


@pytest.mark.parametrize("seq_len", [1, 40, 64, 100, 1024])
def test_p_one_is_every_line(seq_len: int) -> None:
    q, k, _ = random_qkv(seq_len)
    index = estimate_index(q, k, config=MTrainingConfig(top_p=1, max_vertical=None))
    assert index.slash_bits().all()
    n = index.num_blocks
    assert torch.equal(index.block_pairs(), torch.full((1, 4), n * (n + 1) // 2))


@pytest.mark.parametrize("seq_len", [128, 8192])
def test_spikes_at_positions_that_bf16_cannot_count(seq_len: int) -> None:  # D6
    spikes = [s for s in (33, 257, 2049, 5003) if s < seq_len - 64]
    q, k, _ = random_qkv(seq_len, heads=2, kv_heads=1, dtype=torch.bfloat16)
    q, k = q.detach() * 0.1 + 1, k.detach() * 0.1
    k[:, spikes] = 6.0
    with torch.autocast("cpu", torch.bfloat16):
        index = estimate_index(q, k, config=MTrainingConfig(top_p=0.9))
    assert index.column_words.dtype == index.slash_words.dtype == torch.int64
    for head in range(2):
        assert index.column_bits()[0, head].nonzero().flatten().tolist() == spikes


@pytest.mark.full
def test_spikes_far_out() -> None:  # D6
    spikes = [257, 2049, 65537, 100003]
    seq_len, layout = 131072, Layout.striped(131072, 4)
    q = torch.full((1, seq_len, 1, 64), 1.0, dtype=torch.bfloat16)
    k = (torch.randn(1, seq_len, 1, 64) * 0.1).bfloat16()
    k[:, spikes] = 6.0
    index = estimate_virtual(q, k, layout=layout, config=MTrainingConfig(top_p=0.9))
    assert index.column_bits()[0, 0].nonzero().flatten().tolist() == spikes


def test_batch_samples_do_not_mix() -> None:  # D1
    q, k = peaked(1024)
    q2, k2 = q.flip(1), k.flip(1)
    both = estimate_index(torch.cat([q, q2]), torch.cat([k, k2]))
    swapped = estimate_index(torch.cat([q2, q]), torch.cat([k2, k]))
    for sample, (one, two) in enumerate(((q, k), (q2, k2))):
        alone = estimate_index(one, two)
        for words in ("slash_words", "column_words"):
            assert torch.equal(getattr(both, words)[sample], getattr(alone, words)[0])
            assert torch.equal(getattr(swapped, words)[1 - sample], getattr(alone, words)[0])


def test_padding_has_no_say() -> None:  # F1
    q, k = peaked(698, dtype=torch.float32)
    documents = Documents.from_cu_seqlens([0, 698], 768, [0, 768])
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 70), value=1e3) for x in (q, k)]
    alone = estimate_index(q, k, config=MTrainingConfig(top_p=0.9))
    for cp_size in (1, 2, 4):
        index = estimate_virtual(
            padded[0],
            padded[1],
            layout=Layout.striped(768, cp_size),
            config=MTrainingConfig(top_p=0.9),
            documents=documents,
        )
        assert torch.equal(index.column_bits()[..., :698], alone.column_bits())
        assert torch.equal(index.slash_bits()[..., :11], alone.slash_bits())


def test_a_diverged_model_stops_nothing() -> None:
    q, k = peaked(512)
    k[0, 100] = float("nan")
    index = estimate_index(q, k)
    assert index.slash_bits()[..., 0].all()


def test_share_is_compared_exactly() -> None:
    # Ten equal blocks: six of them hold exactly 0.6 of the mass, seven are not needed.
    assert by_sorting([1] * 6 + [0] * 4, list(range(10)), Fraction(6, 10), None) == set(range(6))


@pytest.mark.parametrize("seq_len", [256, 4096, 65536])
def test_an_estimated_full_budget_is_every_block(seq_len: int) -> None:  # D5
    q, k, _ = random_qkv(seq_len, 1, 1, dim=16, dtype=torch.bfloat16)
    n = seq_len // 64
    for config in (MTrainingConfig(top_p=1), MTrainingConfig(top_p=1, max_slash=n, max_vertical=seq_len)):
        assert int(estimate_index(q, k, config=config).block_pairs()) == n * (n + 1) // 2


def test_a_short_sequence_after_a_long_one() -> None:  # D4
    results = []
    for seq_len in (256, 4096, 256):
        generator = torch.Generator().manual_seed(seq_len)
        q, k = (torch.randn(1, seq_len, h, 64, generator=generator) for h in (2, 1))
        results.append(estimate_index(q, k))
    assert torch.equal(results[0].column_words, results[2].column_words)
    assert torch.equal(results[0].slash_words, results[2].slash_words)


def test_when_everything_ties_all_ranks_agree() -> None:  # E1
    q, k = torch.ones(1, 1024, 2, 64), torch.ones(1, 1024, 1, 64)
    config = MTrainingConfig(top_p=0.5, max_vertical=100, max_slash=3)
    first = estimate_index(q, k, config=config)
    # Ties at the cap: smaller distances (the diagonal, with half a block's mass, is forced), later positions.
    assert first.slash_bits()[0, 1].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert first.column_bits()[0, 0].nonzero().flatten().tolist() == list(range(860, 960))
    for cp_size in (2, 4):
        for layout in (Layout.striped(1024, cp_size), Layout.zigzag(1024, cp_size)):
            index = estimate_virtual(q, k, layout=layout, config=config, check_same=True)
            assert torch.equal(index.column_words, first.column_words)
            assert torch.equal(index.slash_words, first.slash_words)
