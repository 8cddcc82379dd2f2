"""The authors' Triton kernel as a peer: what it is told to attend, and what is said where it is not there."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_ops, minference, peers
from benchmarks.problems import Problem
from megatron_mtraining.config import BLOCK


def test_its_lists_are_the_mask() -> None:
    index = Problem(1024, 3, 1, 64, 0.3, device="cpu").index()
    bar_idx, bar_cnt, block_idx, block_cnt = minference.lists(index)
    mask = torch.zeros(3, 1024, 1024, dtype=torch.bool)
    for head in range(3):
        for row in range(1024 // BLOCK):
            kept = block_idx[0, head, row, : block_cnt[0, head, row]].long()
            assert bool((kept.diff() > 0).all())  # the kernel masks the last two alone
            begin, end = bar_cnt[0, head, row].tolist()
            rows = mask[head, row * BLOCK : (row + 1) * BLOCK]
            rows.unflatten(1, (-1, BLOCK))[:, kept] = True
            rows[:, bar_idx[0, head, row, begin:end].long()] = True
    assert torch.equal(mask.tril(), index.to_mask()[0])


def test_a_checkout_without_the_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_ops", "--minference", str(tmp_path)])
    with pytest.raises(SystemExit):
        bench_ops.arguments()
    assert f"--minference: {tmp_path} has no minference.ops.minference_attn_triton" in capsys.readouterr().err
    assert peers.sparse(None) == {}


def test_the_kernel_is_loaded_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "minference" / "ops"
    folder.mkdir(parents=True)
    (tmp_path / "minference" / "__init__.py").write_text("raise ImportError('not to be imported')")
    (folder / "utils.py").write_text("NAME = 'utils'")
    (folder / "minference_attn_triton.py").write_text("from .utils import NAME")
    monkeypatch.setattr(sys, "modules", {name: x for name, x in sys.modules.items() if "minference" not in name})
    assert minference.kernels(minference.checkout(str(tmp_path))).NAME == "utils"
    assert list(peers.sparse(tmp_path)) == ["minference-triton"]
