"""MTraining (arXiv 2510.18830): distributed dynamic sparse attention for training with ultra-long contexts.

Importing this package needs neither CUDA nor Megatron; ``megatron_mtraining.launch`` and ``.integration`` connect it to
Megatron-LM.
"""

from .attention import AttentionAux, MTrainingAttention, estimate_index, mtraining_attention
from .block_lists import BlockListIndex
from .config import MTrainingConfig
from .documents import Documents
from .index import VerticalSlashIndex
from .layout import Layout

__all__ = [
    "AttentionAux",
    "BlockListIndex",
    "Documents",
    "Layout",
    "MTrainingAttention",
    "MTrainingConfig",
    "VerticalSlashIndex",
    "estimate_index",
    "mtraining_attention",
]

__version__ = "0.1.0"
