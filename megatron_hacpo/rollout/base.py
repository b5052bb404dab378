"""The interface between the training loop and whatever generates responses."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

FinishReason = Literal["stop", "length"]
"""`stop`: the last token is a stop token. `length`: cut at `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn. `temperature` 0 is greedy (log-probs are then those at temperature 1)."""

    responses_per_prompt: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.responses_per_prompt >= 1
        assert self.max_tokens >= 1
        assert self.temperature >= 0.0
        assert 0.0 < self.top_p <= 1.0
        assert self.top_k >= 0


@dataclass(frozen=True)
class Response:
    """One sampled response.

    token_ids: int32 [L], as sampled, the final stop token included.
    log_probs: float32 [L], log_softmax(logits / temperature) of each token, before top-p and top-k.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        assert self.token_ids.dtype == np.int32
        assert self.token_ids.shape == self.log_probs.shape


OnResponse = Callable[[int, Response], None]
"""Told of a complete response: its place in the prompt-major order, and the response."""


def ignore(index: int, response: Response) -> None:
    """For those who wait for all responses."""


class Generate(Protocol):
    """`Engine.generate` or `Rollout.generate`."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response] | None: ...


class Engine(Protocol):
    """Generates responses with the newest weights it was given; lives in one process."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response]:
        """`responses_per_prompt` responses per prompt, prompt-major: prompt 0's responses first.

        on_response: called by this thread once for each response, as soon as it is complete, so in any order.
        """
        ...

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace every weight by the streamed (Hugging Face name, full tensor) pairs.

        Raises ValueError, naming the tensor, on an unknown, missing or wrongly shaped one.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class BrokenWeights(RuntimeError):  # noqa: N818 - reads as what happened
    """Log-probs of a response are not finite. index: its place in the prompt-major order."""

    def __init__(self, text: str, index: int = 0) -> None:
        super().__init__(text)
        self.index = index


class RolloutLost(RuntimeError):  # noqa: N818 - reads as what happened
    """Nothing is left that could generate."""


class Rollout(Protocol):
    """How an agent's ranks generate, whatever does it. Every method is a collective of the agent's world."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response] | None:
        """The leader's prompts are answered as `Engine.generate` does; None on the other ranks.

        on_response: as there, of the leader alone. Raises RolloutLost, on every rank alike.
        """
        ...

    def sync_weights(self, version: int) -> None:
        """From now on generate with the policy's current weights, known as `version`.

        Raises RuntimeError, naming the tensor, if one of them is not finite.
        """
        ...

    def release(self) -> None:
        """Until the next `sync_weights` nothing is generated: the policy may have all memory."""
        ...

    def close(self) -> None:
        """Free what generates."""
        ...


def finite(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs; RuntimeError at one that is not finite, since no engine could say so."""
    for name, tensor in tensors:
        # The extremes are NaN if anything is. They are one pass over the memory, isfinite and all are ten.
        if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise RuntimeError(f"{name} is not finite after step {version}; no weights were given on")
        yield name, tensor
