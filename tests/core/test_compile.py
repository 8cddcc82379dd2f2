"""``torch.compile`` of a model around attention: one graph, the same numbers, no new compilation for a new index."""  # K5

import copy
import gc

import torch

from megatron_mtraining import MTrainingAttention, MTrainingConfig, mtraining_attention

CONFIG = MTrainingConfig(top_p=0.7)


class Model(torch.nn.Module):
    """One projection to q, k and v, and attention."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 8 * 64)
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, -1, 8, 64).split([4, 2, 2], 2)
        return self.attention(q, k, v).relu() + 1


def test_one_graph_for_every_index() -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    model = Model(MTrainingAttention(256, 64, config=CONFIG))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        x = torch.randn(2, 256, 32)
        results = []
        for run in (model, compiled):
            model.zero_grad()
            out = run(x)
            out.square().sum().backward()
            results.append((out.detach(), model.project.weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(graphs) == 1


def test_module_is_the_function() -> None:
    q, k, v = torch.randn(1, 200, 4, 64), torch.randn(1, 200, 2, 64), torch.randn(1, 200, 2, 64)
    module = MTrainingAttention(200, 64, config=CONFIG)
    assert torch.equal(module(q, k, v), mtraining_attention(q, k, v, config=CONFIG))


def test_a_copy_outlives_the_module() -> None:
    q, k, v = torch.randn(1, 128, 4, 64), torch.randn(1, 128, 2, 64), torch.randn(1, 128, 2, 64)
    module = MTrainingAttention(128, 64, config=CONFIG)
    expected, copied = module(q, k, v), copy.deepcopy(module)
    del module
    gc.collect()
    assert torch.equal(copied(q, k, v), expected)


def test_opcheck_of_the_ring() -> None:
    module = MTrainingAttention(128, 64, config=CONFIG)  # its context lives as long as it does
    number = module._number
    ops = torch.ops.megatron_mtraining
    q = torch.randn(1, 128, 2, 64, requires_grad=True)
    k = torch.randn(1, 128, 1, 64, requires_grad=True)
    words = ops.estimate(q, k, number)
    torch.library.opcheck(ops.estimate, (q.detach(), k.detach(), number))
    torch.library.opcheck(ops.ring_attention, (q, k, k.detach().clone().requires_grad_(), *words, number))
