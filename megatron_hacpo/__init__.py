"""Heterogeneous-agent collaborative reinforcement learning (HACPO, arXiv 2603.02604) on Megatron-core."""

__version__ = "0.1.0"
