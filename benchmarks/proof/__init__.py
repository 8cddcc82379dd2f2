"""Proof on a real pretrained model: SmolLM2-135M continued at 32K-64K tokens, dense and sparse (docs/proof.md)."""
