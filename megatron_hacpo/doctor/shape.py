"""What a model is in numbers: parameters per rank, cache and activations per token, work per sequence."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hacpo.config import AgentConfig, ParallelConfig, RunConfig
from megatron_hacpo.hf.families import (
    EMBEDDING,
    Weight,
    expert_count,
    family_of,
    is_tied,
    model_weights,
    sizes,
)
from megatron_hacpo.hf.read import read_config

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""By `agents.NAME.dtype`."""


@dataclass(frozen=True)
class Held:
    """Parameters of one rank. dense: whose optimizer states are divided over data and context; expert: those
    of experts, whose states are divided over the ranks that hold the same experts."""

    dense: int
    expert: int

    @property
    def all(self) -> int:
        return self.dense + self.expert


class Shape:
    """A model by its config.json. Without the padding of the vocabulary, at most a row a rank."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._sizes = sizes(hf)
        self._layer = family_of(hf).layer
        self.layers = int(hf.num_hidden_layers)
        self.hidden = self._sizes["hidden"]
        self.vocab = self._sizes["vocab"]
        experts = expert_count(hf)
        self._ffn = hf.num_experts_per_tok * self._sizes["expert_ffn"] if experts else self._sizes["ffn"]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self._count(model_weights(self._hf)) + self.layers * self._count(self._layer)

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self._sizes["keys"]

    def forward(self, tokens: float) -> float:
        """FLOPs of a forward pass over a sequence of so many tokens, as `megatron.batching.Cost` counts them:
        2 per weight and token, and causal attention. Not taken from there: what imports Megatron-core cannot
        tell that it is missing."""
        queries, keys = self._sizes["queries"], self._sizes["keys"]
        layer = 4 * self.hidden * (queries + keys) + 6 * self.hidden * self._ffn
        pairs = 2 * self.layers * queries
        return (self.layers * layer + 2 * self.hidden * self.vocab + pairs * tokens) * tokens

    def held(self, parallel: ParallelConfig, stage: int) -> Held:
        """By a rank of pipeline stage `stage`, counted from 0. A tied embedding is in the first stage and, as
        the output layer, in the last."""
        last = parallel.pipeline - 1
        ends = []
        if stage == 0:
            ends.append(EMBEDDING)
        if stage == last:
            ends += [weight for weight in model_weights(self._hf) if weight is not EMBEDDING]
            if is_tied(self._hf) and last > 0:
                ends.append(EMBEDDING)
        layers = self.layers // parallel.pipeline
        dense = [weight for weight in self._layer if not weight.is_expert]
        experts = [weight for weight in self._layer if weight.is_expert]
        return Held(
            dense=self._count(ends, parallel.tensor) + layers * self._count(dense, parallel.tensor),
            expert=layers * self._count(experts) // parallel.expert,
        )

    def activation_elements(self, parallel: ParallelConfig) -> float:
        """That backward needs of one layer and one token, on one rank of those that share the token.

        Inputs and outputs of both norms; queries, keys and values after the rotation, before it too if they
        are normalised; what attention gives; gate and up, silu(gate) and its product with up, these of every
        expert that the token goes to, with the token's copies for them. Attention is fused: no scores.
        """
        norms = 4 * self.hidden
        queries, keys = self._sizes["queries"], self._sizes["keys"]
        attention = 2 * queries + 2 * keys + (queries + keys if family_of(self._hf).qk_norm else 0)
        copies = 2 * self._hf.num_experts_per_tok * self.hidden if expert_count(self._hf) else 0
        shared = attention + 4 * self._ffn + copies
        return shared / parallel.tensor + norms / sequence_parts(parallel)

    def _count(self, weights: Iterable[Weight], tensor: int = 1) -> int:
        """Parameters, of those that are divided one rank's."""
        total = 0
        for weight in weights:
            number = sum(math.prod(self._sizes[size] for size in s) for s in weight.tensors.values())
            if weight.is_expert:
                number *= self._sizes["experts"]
            total += number if weight.split == "whole" else math.ceil(number / tensor)
        return total


def sequence_parts(parallel: ParallelConfig) -> int:
    """Into how many parts tensor-parallel ranks divide the activations between their matrices."""
    return parallel.tensor if parallel.sequence else 1


def read_shape(agent: AgentConfig) -> Shape:
    """Raises ValueError for a folder whose config.json is missing or not supported."""
    return Shape(read_config(Path(agent.model)))


def read_shapes(config: RunConfig) -> dict[str, Shape | ValueError]:
    """By agent; what is wrong with its folder in place of a shape."""
    found: dict[str, Shape | ValueError] = {}
    for name, agent in config.agents.items():
        try:
            found[name] = read_shape(agent)
        except ValueError as error:
            found[name] = error
    return found


@dataclass(frozen=True)
class Lengths:
    """Assumed means, in tokens of the agent's own tokenizer: half of the longest."""

    prompt: float
    response: float

    @property
    def sequence(self) -> float:
        return self.prompt + self.response

    @property
    def in_flight(self) -> float:
        """Of a sequence whose response is being drawn, in the mean over that time."""
        return self.prompt + self.response / 2


def lengths(agent: AgentConfig) -> Lengths:
    """Of an agent's prompts and responses."""
    return Lengths(agent.rollout.max_prompt_tokens / 2, agent.rollout.max_response_tokens / 2)
