"""Hugging Face models that run on a compact layout: ``prepare`` one and call it with a layout."""

from harts.models.policy import PolicyOutput, Recomputation, TreePolicy, prepare, update_expert_bias

__all__ = ["PolicyOutput", "Recomputation", "TreePolicy", "prepare", "update_expert_bias"]
