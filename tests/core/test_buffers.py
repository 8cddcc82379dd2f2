"""The pool of ring buffers."""

import torch

from megatron_mtraining.buffers import BufferPool

CPU = torch.device("cpu")


def test_a_buffer_has_one_holder() -> None:
    pool = BufferPool()
    first, second = (pool.take((2, 3), torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.take((2, 3), torch.float32, CPU) is first


def test_only_a_buffer_of_the_same_kind_is_reused() -> None:
    pool = BufferPool()
    given = pool.take((2, 3), torch.float32, CPU)
    pool.give(given)
    for shape, dtype in (((3, 2), torch.float32), ((2, 3), torch.float64)):
        other = pool.take(shape, dtype, CPU)
        assert other is not given and other.shape == shape and other.dtype == dtype


def test_the_longest_idle_are_freed() -> None:
    pool = BufferPool(max_idle=2)
    held = [pool.take((n,), torch.float32, CPU) for n in (1, 2, 3)]
    for buffer in held:
        pool.give(buffer)
    assert pool.take((1,), torch.float32, CPU) is not held[0]
    assert pool.take((3,), torch.float32, CPU) is held[2]
    pool.clear()
    assert pool.take((2,), torch.float32, CPU) is not held[1]
