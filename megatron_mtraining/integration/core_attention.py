"""The ``core_attention`` module that Megatron's attention layers call."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.utils import InferenceMode
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_mtraining.attention import AttentionAux, attention_on_groups, estimate_index
from megatron_mtraining.config import MTrainingConfig
from megatron_mtraining.documents import Documents
from megatron_mtraining.index import VerticalSlashIndex
from megatron_mtraining.layout import Layout
from megatron_mtraining.metrics import Recorder
from megatron_mtraining.recall import probe_recall

from . import runtime
from .conversion import Placement, convert, convert_qkv
from .errors import RefusedError
from .groups import ring_groups
from .guard import Guard
from .layout_mode import CONVERT
from .packing import packing_of, placed_by_document
from .refusals import refuse
from .static_inference import dense_inference_attention


class MTrainingCoreAttention(MegatronModule):
    """MTraining attention behind Megatron's core attention contract.

    It has no parameters and no extra state, so checkpoints of dense models load into it and the other way round. The
    number of heads is read from the tensors (key and value heads come unexpanded), the process groups from Megatron
    at each call.

    Args:
        config: the model's config; checked against :data:`.refusals.REFUSALS`.
        layer_number: Megatron's number of the layer, from 1. Options, metrics and messages count from 0 (``layer_index``),
            as checkpoints and Megatron's log of experts do.
        attn_mask_type: must be causal.
        attention_type: must be ``self``.
        attention_dropout: must be None or 0.
        softmax_scale: scale of the logits; ``1 / sqrt(head_dim)`` if left out.
        k_channels: head dimension of queries and keys, given by multi-latent attention.
        v_channels: head dimension of values; must equal ``k_channels``.
        num_splits: taken for the sake of the contract; must be None.
        cp_comm_type: taken for the sake of the contract; the ring does not depend on it.
        pg_collection: process groups; Megatron's global ones if left out.
        mtraining: the attention's config; that of the launcher if left out. A config of its own does not follow what was
            set by layer and by step.

    Raises:
        RefusedError: for what is not supported; names the option and its value.
    """

    def __init__(  # noqa: PLR0913 - Megatron's contract
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        mtraining: MTrainingConfig | None = None,
    ) -> None:
        super().__init__(config=config)
        refuse(config)
        if attention_type != "self":
            raise RefusedError(f"attention_type {attention_type}: MTraining attention is for self-attention only")
        _check_mask_type(attn_mask_type)
        if attention_dropout:
            raise RefusedError(f"attention_dropout {attention_dropout}: attention dropout is not built; use 0")
        if num_splits is not None:
            raise RefusedError(f"num_splits {num_splits}: not supported; use None")
        if k_channels != v_channels:
            raise RefusedError(f"k_channels {k_channels}, v_channels {v_channels}: head dimensions must be equal")
        self.layer_number = max(1, layer_number)
        self.layer_index = self.layer_number - 1  # what users see; the check of the built model renumbers MTP layers
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.softmax_scale = softmax_scale
        self.cp_comm_type = cp_comm_type
        self.pg_collection = pg_collection
        self.follows_plan = mtraining is None
        self.mtraining = runtime.current().config if mtraining is None else mtraining
        _check_own_config(self.mtraining)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention of the local queries over the keys and values of every context-parallel rank.

        Args:
            query: ``[local_seq, batch, heads, head_dim]``; packed sequences: ``[tokens, heads, head_dim]``.
            key: ``[local_seq, batch, kv_heads, head_dim]``, or without batch.
            value: like ``key``; any strides.
            attention_mask: must be None: the mask type defines the mask. Static-batch inference, whose mask Megatron
                makes causal, does not read it.
            attn_mask_type: that of the call; causal. Static-batch inference passes ``no_mask`` past the prompt.
            attention_bias: must be None.
            packed_seq_params: documents of a packed sequence.
            num_splits: must be None.

        Returns:
            ``[local_seq, batch, heads * head_dim]``; packed sequences: ``[tokens, heads, head_dim]`` flattened alike.

        Raises:
            RefusedError: for an argument that is not supported; names it and its value.
        """
        if attention_bias is not None:
            raise RefusedError(f"attention_bias of shape {tuple(attention_bias.shape)}: not supported; use None")
        if num_splits is not None:
            raise RefusedError(f"num_splits {num_splits}: not supported; use None")
        cp_group = self._cp_group()
        if not self.training and (InferenceMode.is_active() or query.shape[0] != key.shape[0]):
            if cp_group is not None:
                raise RefusedError(
                    f"--context-parallel-size {cp_group.size()}: inference is supported on one rank only"
                )
            return dense_inference_attention(query, key, value, self.softmax_scale)
        if query.shape[0] != key.shape[0]:
            raise RefusedError(
                f"{query.shape[0]} queries, {key.shape[0]} keys: MTraining attention is for self-attention"
            )
        _check_mask_type(
            self.attn_mask_type if attn_mask_type is None else attn_mask_type, packed_seq_params is not None
        )
        if attention_mask is not None:
            raise RefusedError(
                f"attention_mask of shape {tuple(attention_mask.shape)}: padding and arbitrary masks are not supported; "
                "use None, which is causal (--no-create-attention-mask-in-dataloader)"
            )
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, cp_group)
        if cp_group is None:
            layout = runtime.one_rank_layout(query.shape[0])
            return self._attend(query, key, value, layout, None)
        return self._over_ranks(query, key, value, cp_group)

    def _over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, cp_group: torch.distributed.ProcessGroup
    ) -> Tensor:
        """The call on several ranks, with conversion of the layout where the model holds another."""
        state = runtime.current()
        seq_len = query.shape[0] * cp_group.size()
        layout = state.attention_layout(seq_len, cp_group.size())
        if state.layout_mode.mode != CONVERT:
            self._check_dealt(state, seq_len)
            return self._attend(query, key, value, layout, cp_group)
        held = Placement.of(state.model_layout(seq_len, cp_group.size()))
        return self._converted(query, key, value, held, layout, cp_group)

    def _converted(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        held: Placement,
        layout: Layout,
        cp_group: torch.distributed.ProcessGroup,
        documents: Documents | None = None,
    ) -> Tensor:
        """:meth:`_attend` for a sequence that the model holds elsewhere: one all-to-all before, one after."""
        wanted = Placement.of(layout)
        moved = convert_qkv(query, key, value, held, wanted, cp_group)
        return convert(self._attend(*moved, layout, cp_group, documents), wanted, held, cp_group)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Layout,
        cp_group: torch.distributed.ProcessGroup | None,
        documents: Documents | None = None,
    ) -> Tensor:
        """``[s, b, h, d]`` in, ``[s, b, h * d]`` out; the transposes are views."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        state, layer = runtime.current_or_none(), self.layer_index
        config, index = self.mtraining, None
        if state is not None and self.follows_plan:
            config = state.plan.config_for(config, layer, state.steps_done())
        if state is not None and state.guard is not None and not config.dense:
            index = self._guarded(state.guard, q, k, config, layout, cp_group, documents)
        out, aux = attention_on_groups(
            q,
            k,
            v,
            config=config,
            layout=layout,
            softmax_scale=self.softmax_scale,
            groups=ring_groups(cp_group),
            return_aux=True,
            index=index,
            documents=documents if index is None else None,
        )
        if state is not None and self.training:
            if state.recorder is not None and state.recorder.armed:
                self._record(state.recorder, q, k, aux, config, cp_group)
            if state.dump is not None:
                state.dump(aux.index, state.steps_done() + 1, layer, cp_group)
        return out.transpose(0, 1).flatten(2)

    def _record(
        self,
        recorder: Recorder,
        q: Tensor,
        k: Tensor,
        aux: AttentionAux,
        config: MTrainingConfig,
        cp_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        """Leaves the index with the recorder and, in the first call of a layer, the probe's recall: all on the device."""
        layer = self.layer_index
        recorder.record(layer, aux.index, aux.layout, aux.inner_size, cp_group)
        if not recorder.takes_recall or layer in recorder.recalls or not isinstance(aux.index, VerticalSlashIndex):
            return
        if config.dense:
            recorder.recalls[layer] = torch.ones((), dtype=torch.float64, device=q.device)
            return
        recorder.recalls[layer] = probe_recall(
            q, k, aux.index, config=config, layout=aux.layout, cp_group=cp_group, softmax_scale=self.softmax_scale
        )

    def _guarded(
        self,
        guard: Guard,
        q: Tensor,
        k: Tensor,
        config: MTrainingConfig,
        layout: Layout,
        cp_group: torch.distributed.ProcessGroup | None,
        documents: Documents | None,
    ) -> VerticalSlashIndex:
        """The estimated index, or every line where it breaks the guard's bounds."""
        where: dict[str, Any] = {
            "config": config, "layout": layout, "cp_group": cp_group, "softmax_scale": self.softmax_scale
        }  # fmt: skip
        index = estimate_index(q, k, documents=documents, **where)
        layer = self.layer_index if self.training else None
        return guard(q, k, index, tp_group=self._tp_group(), layer=layer, **where)

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSeqParams,
        cp_group: torch.distributed.ProcessGroup | None,
    ) -> Tensor:
        """Packed sequences ``[t, h, d]``: each document has its own index, none sees another.

        The sequence is dealt over the packed length in the attention's layout, or document by document by Megatron.
        """
        if packed.cp_group is not None and packed.cp_group.size() > 1 and packed.cp_group is not cp_group:
            raise RefusedError("packed_seq_params.cp_group: groups that change from batch to batch are not built")
        cp_size = 1 if cp_group is None else cp_group.size()
        if getattr(packed, "local_cp_size", None) not in (None, cp_size):
            raise RefusedError(
                f"packed_seq_params.local_cp_size {packed.local_cp_size}: groups that change from batch to batch are not "
                f"built; use None or --context-parallel-size, {cp_size}"
            )
        seq_len = query.shape[0] * cp_size
        packing = packing_of(packed, seq_len)
        q, k, v = (x.unsqueeze(1) if x.dim() == 3 else x for x in (query, key, value))
        if cp_group is None:
            out = self._attend(q, k, v, runtime.one_rank_layout(seq_len), None, packing.documents)
            return out.squeeze(1) if query.dim() == 3 else out
        state = runtime.current()
        layout = state.attention_layout(seq_len, cp_size)
        if state.layout_mode.replaces_slicing:
            self._check_dealt(state, seq_len)
            out = self._attend(q, k, v, layout, cp_group, packing.documents)
        else:
            held = placed_by_document(packing.bounds, seq_len, cp_size)
            out = self._converted(q, k, v, held, layout, cp_group, packing.documents)
        return out.squeeze(1) if query.dim() == 3 else out

    def _tp_group(self) -> torch.distributed.ProcessGroup | None:
        """Megatron's tensor-parallel group: the ranks with the layer's other heads."""
        group = getattr(self.pg_collection, "tp", None)
        if group is None and parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_tensor_model_parallel_group()
        return group

    def _cp_group(self) -> torch.distributed.ProcessGroup | None:
        """Megatron's context-parallel group of this moment; None where one rank holds the sequence."""
        group = getattr(self.pg_collection, "cp", None)
        if group is None and parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_context_parallel_group()
        return None if group is None or group.size() == 1 else group

    @staticmethod
    def _check_dealt(state: runtime.Runtime, seq_len: int) -> None:
        """Asserts that batch and rotary embedding were dealt natively at this length, not by another slicer."""
        if not state.layout_mode.replaces_slicing:
            return
        for what in state.expects:
            if seq_len not in state.dealt[what]:
                raise RefusedError(
                    f"the {what} of a sequence of {seq_len} tokens was not dealt in the layout of attention (lengths "
                    f"dealt: {sorted(state.dealt[what])}): slice it with megatron_mtraining.integration.deal_{what}, "
                    "or use --mtraining-layout-mode convert"
                )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Drops the extra state that Transformer Engine saves for a core attention; there is nothing to load."""
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_own_config(own: MTrainingConfig) -> None:
    """Refuses what a module's own config cannot choose: ranks hold the sequence, and form rings, as the set-up says."""
    if not runtime.is_set_up():  # on one rank a module may do without
        return
    common = runtime.current().config
    for name in ("layout", "stripe_size", "stripe_rotation", "ring"):
        value, wanted = getattr(own, name), getattr(common, name)
        if value not in (wanted, getattr(MTrainingConfig, name)):
            raise RefusedError(f"mtraining.{name} {value}: the same for all layers; that of the set-up is {wanted}")


def _check_mask_type(mask_type: AttnMaskType, packed: bool = False) -> None:
    """Refuses masks that are not causal; ``padding_causal`` is what packed sequences call theirs."""
    valid = [AttnMaskType.causal, AttnMaskType.padding_causal][: 1 + packed]
    if mask_type not in valid:
        raise RefusedError(f"attn_mask_type {mask_type.name}: not supported; use {' or '.join(m.name for m in valid)}")
