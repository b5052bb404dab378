"""The embedded engine: a transformers causal LM in this process, with its own sampling loop."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from megatron_hacpo.hf.read import is_checkpoint
from megatron_hacpo.rollout.base import BrokenWeights, FinishReason, OnResponse, Response, Sampling, ignore
from megatron_hacpo.rollout.sampler import sample

# Finished rows leave the batch when at least this share of it has finished: leaving copies the cache once.
_COMPACT_SHARE = 1 / 8


class LocalEngine:
    """Implements `rollout.base.Engine`.

    max_batch_responses: how many responses are generated at once (at least one prompt's).
    stop_ids: any of these ends a response and stays its last token.

    Responses depend on the weights, the prompts and `Sampling` only: not on `max_batch_responses` and not on
    torch's global random state (up to the rounding of differently shaped matrix products).
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        stop_ids: Sequence[int],
        max_batch_responses: int = 1024,
        trust_remote_code: bool = False,
    ) -> None:
        """Loads the Hugging Face folder `model_dir`; of one with a Megatron checkpoint instead of weights it
        builds the model and leaves the weights to `update_weights`.

        Raises ValueError when the folder lacks a config or some of the model's weights, or when a stop id is
        outside the vocabulary or none is given.
        """
        assert max_batch_responses >= 1
        self._model = _load(Path(model_dir), dtype, trust_remote_code).to(device)
        self._device = torch.device(device)
        self._vocab_size: int = self._model.config.vocab_size
        self._max_positions: int = self._model.config.max_position_embeddings
        self._max_batch_responses = max_batch_responses
        self._cache_argument = _cache_argument(self._model)
        self._weights = dict(_hf_weights(self._model))
        self._incomplete = is_checkpoint(Path(model_dir))
        self.weights_version = 0

        if not stop_ids:
            raise ValueError("stop_ids: empty, so no response could stop; give the tokenizer's eos_token_id")
        outside = [token for token in stop_ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(
                f"stop_ids: {outside} outside the vocabulary of {self._vocab_size} of {model_dir}"
            )
        self._stop_ids = torch.tensor(sorted(set(stop_ids)), device=self._device)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response]:
        """`responses_per_prompt` responses per prompt, prompt-major: prompt 0's responses first.

        on_response: called by this thread once for each response, as soon as it is complete, so in any order.
        Raises ValueError for a prompt that is empty, holds an id outside the vocabulary or leaves no room for
        `max_tokens`; RuntimeError when the weights are incomplete (a failed `update_weights`); BrokenWeights.
        """
        if self._incomplete:
            raise RuntimeError(
                "the engine has no complete weights: update_weights failed, or was not called yet"
            )
        self._check_prompts(prompts, sampling.max_tokens)
        generator = torch.Generator().manual_seed(sampling.seed)
        per_batch = max(1, self._max_batch_responses // sampling.responses_per_prompt)
        responses: dict[int, Response] = {}
        with torch.no_grad():
            for start in range(0, len(prompts), per_batch):
                batch = self._generate_batch(prompts[start : start + per_batch], sampling, generator)
                for row, response in batch:
                    index = start * sampling.responses_per_prompt + row
                    self._check_finite(response, index)
                    responses[index] = response
                    on_response(index, response)
        return [responses[index] for index in range(len(responses))]

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies the streamed (Hugging Face name, full tensor) pairs in place, cast to the model's dtype.

        Tied weights come once: with `tie_word_embeddings`, `lm_head.weight` is not in the stream. Raises
        ValueError, naming the tensor, on an unknown, repeated, missing or wrongly shaped one. After any error
        `generate` refuses until a later update succeeds.
        """
        self._incomplete = True
        received: set[str] = set()
        with torch.no_grad():
            for name, tensor in tensors:
                weight = self._weights.get(name)
                if weight is None:
                    raise ValueError(
                        f"{name}: not a weight of {type(self._model).__name__} (tied ones come once)"
                    )
                if name in received:
                    raise ValueError(f"{name}: streamed twice")
                if weight.shape != tensor.shape:
                    expected, got = tuple(weight.shape), tuple(tensor.shape)
                    raise ValueError(f"{name}: shape {got}, but the model's is {expected}")
                weight.copy_(tensor)
                received.add(name)
        missing = sorted(self._weights.keys() - received)
        if missing:
            raise ValueError(
                f"{', '.join(missing[:5])}: missing in the stream ({len(missing)} weights in all)"
            )
        self.weights_version = version
        self._incomplete = False

    def close(self) -> None:
        """Frees the model; the engine cannot be used afterwards."""
        del self._model, self._weights

    def _check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {index}: no tokens")
            if len(prompt) + max_tokens > self._max_positions:
                raise ValueError(
                    f"prompt {index}: {len(prompt)} tokens and max_tokens {max_tokens} exceed the model's "
                    f"max_position_embeddings {self._max_positions}; lower rollout.max_prompt_tokens or "
                    "rollout.max_response_tokens"
                )
            if min(prompt) < 0 or max(prompt) >= self._vocab_size:
                raise ValueError(f"prompt {index}: a token id outside the vocabulary of {self._vocab_size}")

    def _check_finite(self, response: Response, index: int) -> None:
        if not np.isfinite(response.log_probs).all():
            text = f"log-probs are not finite: the weights of version {self.weights_version} are broken"
            raise BrokenWeights(text, index)

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator
    ) -> Iterator[tuple[int, Response]]:
        """Each response as soon as it is complete, with its place in the batch."""
        group, max_tokens = sampling.responses_per_prompt, sampling.max_tokens
        count = len(prompts) * group
        # float64 on the CPU, one row per response: the same draws on every device and for every batch size.
        uniforms = torch.rand(count, max_tokens, generator=generator, dtype=torch.float64).to(self._device)
        tokens = torch.zeros(count, max_tokens, dtype=torch.long, device=self._device)
        log_probs = torch.zeros(count, max_tokens, device=self._device)
        running = torch.ones(count, dtype=torch.bool, device=self._device)

        ids, mask = _left_pad(prompts, self._device)
        cache = DynamicCache(config=self._model.config)
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)
        logits = self._forward(ids, mask, positions, cache).repeat_interleave(group, dim=0)
        cache.batch_repeat_interleave(group)
        mask = mask.repeat_interleave(group, dim=0)
        position = positions[:, -1:].repeat_interleave(group, dim=0)
        rows = torch.arange(count, device=self._device)  # the responses that are still in the batch

        for t in range(max_tokens):
            token, log_prob = sample(logits, uniforms[rows, t], sampling)
            tokens[rows, t] = token
            log_probs[rows, t] = log_prob
            stopped = rows[torch.isin(token, self._stop_ids) & running[rows]]
            running[stopped] = False
            if len(stopped) > 0:
                yield from self._completed(stopped, tokens[:, : t + 1], log_probs[:, : t + 1], "stop")
            left = running[rows].nonzero().squeeze(1)
            if len(left) == 0 or t + 1 == max_tokens:
                break
            if len(left) <= (1 - _COMPACT_SHARE) * len(rows):
                rows, token, mask, position = rows[left], token[left], mask[left], position[left]
                cache.batch_select_indices(left)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            position = position + 1
            logits = self._forward(token[:, None], mask, position, cache)
        yield from self._completed(rows[left], tokens, log_probs, "length")

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of the last position; the cache grows in place."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        return output.logits[:, -1]

    def _completed(
        self, rows: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor, reason: FinishReason
    ) -> Iterator[tuple[int, Response]]:
        """The responses of these rows, which have all columns of tokens and log-probs."""
        token_rows = tokens[rows].to("cpu", torch.int32).numpy()
        log_prob_rows = log_probs[rows].cpu().numpy()
        for row, token_row, log_prob_row in zip(rows.tolist(), token_rows, log_prob_rows, strict=True):
            yield row, Response(token_row, log_prob_row, reason)


def _load(model_dir: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """A transformers causal LM, frozen and in evaluation mode."""
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"model: {model_dir} is not a Hugging Face model folder (no config.json)")
    if is_checkpoint(model_dir):
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.eval().requires_grad_(False)
    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if info["missing_keys"]:  # transformers would leave them at random values
        raise ValueError(f"model: {model_dir} lacks the weights {sorted(info['missing_keys'])[:5]}")
    return model.eval().requires_grad_(False)


def _hf_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in a Hugging Face folder, parameter); transformers 5 fuses the experts of a layer in memory."""
    for name, parameter in model.named_parameters():
        prefix, fused, rest = name.partition("mlp.experts.")
        if rest == "gate_up_proj":
            for expert, both in enumerate(parameter):
                gate, up = both.chunk(2)
                yield f"{prefix}{fused}{expert}.gate_proj.weight", gate
                yield f"{prefix}{fused}{expert}.up_proj.weight", up
        elif rest == "down_proj":
            for expert, down in enumerate(parameter):
                yield f"{prefix}{fused}{expert}.down_proj.weight", down
        else:
            yield name, parameter


def _cache_argument(model: torch.nn.Module) -> str:
    """Newer transformers call `past_key_values` `cache` and warn at the old name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [prompts, longest] (padding 0) and their mask, both int64."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
