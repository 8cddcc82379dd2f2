import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mtraining import Layout, MTrainingConfig


def layouts(cp_size: int, seq_len: int) -> list[Layout]:
    return [
        Layout.striped(seq_len, cp_size),
        Layout.striped(seq_len, cp_size, 128),
        Layout.zigzag(seq_len, cp_size),
        Layout.contiguous(seq_len, cp_size),
    ]


def test_tables_are_those_of_the_definitions() -> None:
    assert Layout.striped(768, 3).block_position.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert Layout.striped(1024, 2, 128).block_position[1].tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    assert Layout.zigzag(512, 2).block_position.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert Layout.contiguous(512, 2).block_position.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_shard_and_unshard_are_inverse(cp_size: int) -> None:
    x = torch.arange(2 * 2048 * 3).view(2, 2048, 3)
    for layout in layouts(cp_size, 2048):
        shards = [layout.shard(x, rank) for rank in range(cp_size)]
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, x[:, layout.token_position(rank)])
        assert torch.equal(layout.unshard(shards), x)
        other = [layout.shard(x.transpose(0, 1), rank, dim=0) for rank in range(cp_size)]
        assert torch.equal(layout.unshard(other, dim=0), x.transpose(0, 1))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_inverse_table_finds_every_block(cp_size: int) -> None:
    for layout in layouts(cp_size, 2048):
        flat, inverse = layout.block_position.flatten(), layout.inverse("cpu")
        assert torch.equal(flat[inverse.long()], torch.arange(32, dtype=torch.int32))


def test_local_order_is_ascending() -> None:
    # The column operators rely on it.
    for cp_size in (2, 4, 8):
        for layout in layouts(cp_size, 2048):
            assert (layout.block_position.diff(dim=1) > 0).all()


@given(st.integers(1, 5000), st.integers(2, 16), st.sampled_from([64, 128, 192]))
@settings(max_examples=200, deadline=None)
def test_a_length_fits_or_the_nearest_are_named(seq_len: int, cp_size: int, stripe: int) -> None:
    for make, unit in (
        (lambda n: Layout.striped(n, cp_size, stripe), stripe * cp_size),
        (lambda n: Layout.zigzag(n, cp_size), 128 * cp_size),
        (lambda n: Layout.contiguous(n, cp_size), 64 * cp_size),
    ):
        if seq_len % unit == 0:
            assert make(seq_len).local_seq_len * cp_size == seq_len
            continue
        with pytest.raises(ValueError) as error:
            make(seq_len)
        nearest = [int(word) for word in str(error.value).split("nearest: ")[1].split(" or ")]
        for length in nearest:
            make(length)
        assert min(abs(length - seq_len) for length in nearest) == min(
            seq_len % unit or unit, unit - seq_len % unit
        ) or (seq_len < unit)


def test_one_rank_takes_any_length() -> None:
    assert Layout.striped(1000, 1).num_blocks == 16
    assert Layout.zigzag(40, 1).local_seq_len == 40


def test_refusals() -> None:
    layout = Layout.striped(512, 2)
    with pytest.raises(ValueError, match="512"):
        layout.shard(torch.zeros(1, 500), 0)
    with pytest.raises(ValueError, match="cp_rank=2"):
        layout.shard(torch.zeros(1, 512), 2)
    with pytest.raises(ValueError, match="2 parts of 256"):
        layout.unshard([torch.zeros(1, 256)])
    with pytest.raises(ValueError, match="stripe_size=100"):
        Layout.striped(6400, 2, 100)
    with pytest.raises(ValueError, match="cp_size=0"):
        Layout.striped(6400, 0)


def test_config_names_the_layout() -> None:
    assert Layout.from_config(MTrainingConfig(stripe_size=128), 1024, 2) == Layout.striped(1024, 2, 128)
    assert Layout.from_config(MTrainingConfig(layout="zigzag"), 1024, 2) == Layout.zigzag(1024, 2)


def test_layouts_with_other_tables_are_not_equal() -> None:
    table = Layout.striped(512, 2).block_position
    one, two = Layout("own", 512, 2, 64, table), Layout("own", 512, 2, 64, table.flip(0))
    assert one != two and one == Layout("own", 512, 2, 64, table.clone())
