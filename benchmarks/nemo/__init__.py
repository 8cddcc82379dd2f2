"""Megatron-Bridge on GPUs: the steps of docs/from_hf_to_512k.md in small, and recipes at their size, with a line of JSON each.

    python -m benchmarks.nemo qwen --out results --work scratch

Parts, each a process, beside each other: `qwen` and `llama` (import, export), `qwen-logits`, `llama-logits`, `qwen-train`,
`llama-train`, `peft` and `setting`, which wait for what these import, `big`; `qwen-dense` and `llama-dense` wait for what was
trained, and train where this package cannot be imported. Under `torchrun --nproc-per-node 2`: `two-context`, `two-tensor`,
`two-dense`, `two-big`. A step that fails notes its error, and the next one runs. `page.sh` goes through the page by its own
commands.
"""
