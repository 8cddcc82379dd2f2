"""Megatron parses and validates the command of every run of `benchmarks.megatron_four`."""

import pytest

from benchmarks import megatron_four, megatron_runs

RUNS = megatron_four.four_runs() | megatron_four.more_runs()


@pytest.mark.parametrize("name", RUNS)
def test_megatron_takes_the_options(parse, name, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))  # grouped GEMM asks
    options = megatron_runs.Options(tmp_path, tmp_path, "data", tmp_path, 65536, "")
    words = options.arguments(name, f"{megatron_runs.SMALL} {RUNS[name]}")
    args = parse(*words, base=[], world_size=4)
    assert args.data_parallel_size == (2 if name.startswith("dp2") else 1)
    assert args.hierarchical_context_parallel_sizes == ([2, 2] if "2x2" in name else None)
