"""The torch reference of every operator: the definition that the CUDA kernels are tested against.

Work and memory are proportional to the kept pairs. The functions run on any device, in fp64, fp32, bf16 and fp16, and
accumulate in fp32 (fp64 for fp64 inputs).
"""

from .attention import attention_backward_, attention_delta, attention_forward_
from .columns import gather_columns_, list_columns, scatter_columns_, vertical_backward_
from .probe import probe_columns, probe_mass, probe_row_max, probe_row_sum
from .select import select_lines, select_pack, select_round_

__all__ = [
    "attention_backward_",
    "attention_delta",
    "attention_forward_",
    "gather_columns_",
    "list_columns",
    "probe_columns",
    "probe_mass",
    "probe_row_max",
    "probe_row_sum",
    "scatter_columns_",
    "select_lines",
    "select_pack",
    "select_round_",
    "vertical_backward_",
]
