"""The loader of the native library: what it says where the kernels are missing or do not fit. Needs no GPU."""

from pathlib import Path

import pytest
import torch

from megatron_mtraining.ops import native, operators

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_loader():  # type: ignore[no-untyped-def]
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def pretend_built(monkeypatch: pytest.MonkeyPatch, architectures: tuple[int, ...], capability: tuple[int, int]) -> None:
    info = native.BuildInfo("0", "2.11.0", "13.0", architectures)
    monkeypatch.setattr(native, "load", lambda: info)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize(
    ("architectures", "capability", "arch"),
    [((80, 90), (9, 0), 0), ((80, 90), (9, 0), 80), ((80,), (12, 0), 0), ((80,), (8, 6), 80), ((90,), (9, 0), 90)],
)
def test_devices_that_are_served(monkeypatch, architectures, capability, arch) -> None:  # type: ignore[no-untyped-def]
    pretend_built(monkeypatch, architectures, capability)
    native.require(CUDA, torch.bfloat16, 128, arch)


@pytest.mark.parametrize(
    ("architectures", "capability", "arch", "message"),
    [
        ((80,), (7, 5), 0, r"kernel='auto' does not run here: built for sm80, found .* capability 7\.5"),
        ((90,), (8, 0), 0, r"kernel='auto' does not run here: built for sm90, found .* capability 8\.0"),
        ((80,), (9, 0), 90, r"kernel='sm90' does not run here: built for sm80, found .* capability 9\.0"),
        ((80, 90), (12, 0), 90, r"kernel='sm90' does not run here: built for sm80, sm90, found .* capability 12\.0"),
    ],
)
def test_devices_that_are_refused(monkeypatch, architectures, capability, arch, message) -> None:  # type: ignore[no-untyped-def]
    """Case M4."""
    pretend_built(monkeypatch, architectures, capability)
    with pytest.raises(RuntimeError, match=message):
        native.require(CUDA, torch.bfloat16, 128, arch)


def test_inputs_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_built(monkeypatch, (80, 90), (9, 0))
    with pytest.raises(RuntimeError, match=r"bfloat16 and float16, not torch\.float64"):
        native.require(CUDA, torch.float64, 128, 0)
    with pytest.raises(RuntimeError, match="head_dim 64 and 128, not 80"):
        native.require(CUDA, torch.float16, 80, 0)


def test_library_that_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "libmissing.so")
    with pytest.raises(RuntimeError, match=r"not built \(no libmissing\.so\): .*MTRAINING_CUDA=ON.*kernel='reference'"):
        native.load()


def test_library_of_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # M2
    library = tmp_path / "libother.so"
    library.write_bytes(b'not ELF {"version": "1", "torch": "2.99.0", "cuda": "13.0", "architectures": "80"} rest')
    monkeypatch.setattr(native, "LIBRARY", library)
    with pytest.raises(RuntimeError, match=r"libother\.so was built for torch 2\.99\.0, found .*: rebuild it"):
        native.load()


def test_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libany.so"
    library.touch()
    monkeypatch.setattr(native, "LIBRARY", library)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    with pytest.raises(RuntimeError, match=r"need torch >= 2\.11, found 2\.10\.1\+cu130"):
        native.load()


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_kernels_need_cuda_tensors(kernel: str) -> None:
    with pytest.raises(RuntimeError, match=f"kernel='{kernel}' needs CUDA tensors, not cpu"):
        operators(kernel, torch.zeros(1, 64, 1, 64))
