"""Rollouts by an engine in the leader's process."""

from collections.abc import Callable, Iterator, Sequence

import torch

from megatron_hacpo.rollout.base import Engine, OnResponse, Response, Sampling, finite, ignore


class EmbeddedRollout:
    """Implements `rollout.base.Rollout` with the engine that the leader holds; other ranks hold None."""

    def __init__(
        self, engine: Engine | None, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    ) -> None:
        """weights: streams (Hugging Face name, full tensor) to the leader; a collective of the world."""
        self._engine = engine
        self._weights = weights

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response] | None:
        if self._engine is None:
            return None
        return self._engine.generate(prompts, sampling, on_response=on_response)

    def sync_weights(self, version: int) -> None:
        stream = finite(self._weights(), version)
        if self._engine is not None:
            self._engine.update_weights(stream, version)
        else:
            for _ in stream:
                pass

    def release(self) -> None:
        """The embedded engine stays where it is."""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
