"""APEX and flash-attn beside the plugin: Megatron takes other code where they can be imported, and training is the same.

Neither runs without a GPU, so packages of the same names stand in for them here, with torch's arithmetic. Each says on the
rank's output that it was loaded.
"""

from __future__ import annotations

import pytest

from .test_training import CP4, SPARSE, Runs, assert_same_gradients, assert_same_losses, run_scenarios

pytestmark = pytest.mark.full

FILES = {
    "apex/__init__.py": 'print("LOADED apex", flush=True)',
    "apex/optimizers.py": """
import torch

class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, lr, weight_decay, betas, eps, **_):
        super().__init__(params, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)

class FusedSGD(torch.optim.SGD):
    pass
""",
    "apex/multi_tensor_apply.py": """
def multi_tensor_applier(op, noop, lists, *args):
    return op(65536, noop, lists, *args)
""",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": """
import torch

class FusedLayerNormAffineFunction:
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        raise AssertionError("Megatron looks at the signature, and calls apply")

    @staticmethod
    def apply(x, weight, bias, shape, eps):
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
""",
    "amp_C.py": """
def multi_tensor_l2norm(*args):
    from megatron.core.utils import local_multi_tensor_l2_norm
    return local_multi_tensor_l2_norm(*args)

def multi_tensor_scale(*args):
    from megatron.core.utils import local_multi_tensor_scale
    return local_multi_tensor_scale(*args)
""",
    "flash_attn/__init__.py": """
print("LOADED flash_attn", flush=True)
__version__ = "2.8.3"

def refuse(*_, **__):
    raise AssertionError("flash-attn was called")

flash_attn_func = flash_attn_varlen_func = flash_attn_with_kvcache = refuse
""",
    "flash_attn/layers/__init__.py": "",
    "flash_attn/layers/rotary.py": "from flash_attn import refuse as apply_rotary_emb",
}
SCENARIO = f"{SPARSE} {CP4} --normalization LayerNorm"


def test_training_is_the_same_with_apex_and_flash_attn(tmp_path):
    """``--normalization LayerNorm``: the one that APEX has a kernel for."""
    for name, text in FILES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, packages in (("without", []), ("with", [str(tmp_path / "packages")])):
        run_scenarios({name: SCENARIO}, tmp_path, import_path=packages)
        log = (tmp_path / "log").read_text()
        assert [f"LOADED {package}" in log for package in ("apex", "flash_attn")] == [bool(packages)] * 2
    for step in (0, 1):
        assert_same_gradients(Runs(tmp_path), "with", "without", step)
    assert_same_losses(Runs(tmp_path), "with", "without")
