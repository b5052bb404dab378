"""What an agent trains on: responses with their rewards, from engine and verifier or from the disk."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import hash_prompts, pack_ids
from megatron_hacpo.checkpoint.pool import Pool
from megatron_hacpo.config import RunConfig
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.inputs import Verifiers
from megatron_hacpo.learner.own import OwnResponse, Sampled, own_response
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.reward.base import RewardResult
from megatron_hacpo.reward.length import less_overlong
from megatron_hacpo.rollout.base import Generate, Response, Sampling

_SAMPLED = msgspec.msgpack.Decoder(Sampled)


class Sampler:
    """Of one process of one agent; its methods are collectives of the agent's world."""

    def __init__(
        self,
        config: RunConfig,
        name: str,
        world: World,
        tokenizer: AgentTokenizer,
        verifiers: Verifiers | None,
        pool: Pool,
    ) -> None:
        """verifiers: on the leader alone. pool: where the responses of each step are kept."""
        self._config = config
        self._name = name
        self._index = config.names.index(name)
        self._settings = config.agents[name]
        self._world = world
        self._tokenizer = tokenizer
        self._verifiers = verifiers
        self._pool = pool
        self._replays = False

    def generate(self, prompts: Sequence[Prompt], step: int, responses: Generate) -> Sampled | None:
        """G responses per prompt with the current weights; on the leader, None elsewhere.

        responses: the engine. The verifier gets each response as soon as it is complete; `score` waits for
        the rewards. What an attempt before, or the run to be replayed, has left on the disk is taken from
        there, with its rewards.
        """
        prompt_ids = self._tokenizer.render_prompts([p.messages for p in prompts])
        sampled = self._saved(prompts, prompt_ids, step) if self._world.is_leader else None
        there = bytes([sampled is not None]) if self._world.is_leader else None
        self._replays = self._world.broadcast(there) == b"\1"
        if self._replays:
            return sampled
        rollout = self._settings.rollout
        sampling = Sampling(
            responses_per_prompt=rollout.responses_per_prompt,
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=_seed(self._config.run.seed, self._index, step),
        )
        own: dict[int, OwnResponse] = {}

        def submit(index: int, response: Response) -> None:
            assert self._verifiers is not None
            own[index] = own_response(response, self._tokenizer)
            prompt = prompts[index // sampling.responses_per_prompt]
            self._verifiers.usual.submit(index, prompt, own[index].text, response.finish_reason)

        found = responses(prompt_ids, sampling, on_response=submit)
        if found is None:
            return None
        return Sampled(
            _hash(prompts),
            [pack_ids(ids) for ids in prompt_ids],
            [own[index] for index in range(len(found))],
        )

    def _saved(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], step: int
    ) -> Sampled | None:
        """What is on the disk for this step. Raises ValueError if it is not what this run can train on."""
        replay = self._config.debug.replay
        pool = self._pool if replay is None else self._pool.of_run(Path(replay))
        path = pool.sampled_path(step)
        if not path.is_file():
            if replay is not None:
                raise ValueError(
                    f"debug.replay: {replay}: has no responses of agent {self._name} in step {step}: {path} "
                    "is missing; lower run.steps, or raise exchange.keep_steps of the run that samples"
                )
            return None
        try:
            sampled = _SAMPLED.decode(path.read_bytes())
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is damaged ({error}); remove it to sample again") from None
        if sampled.prompts != _hash(prompts):
            raise ValueError(f"{path} is of other prompts; use the data and batch.prompts it was made with")
        if sampled.prompt_ids != [pack_ids(ids) for ids in prompt_ids]:
            raise ValueError(f"{path} is of another tokenizer or chat template; use those it was made with")
        group = self._settings.rollout.responses_per_prompt
        if len(sampled.responses) != len(prompts) * group:
            raise ValueError(
                f"{path} has {len(sampled.responses)} responses to {len(prompts)} prompts, not "
                f"rollout.responses_per_prompt = {group} to each; use what it was made with"
            )
        return sampled

    def score(self, sampled: Sampled | None, step: int) -> Sampled:
        """What `generate` gave the leader, with its rewards, on every rank; and on the disk."""
        payload = None
        if sampled is not None and self._replays:
            payload = msgspec.msgpack.encode(sampled)
        elif sampled is not None:
            assert self._verifiers is not None
            result = self._verifiers.usual.collect()
            complain(self._name, result)
            shaped = self._shaped(result.rewards, sampled)
            rewards = [None if np.isnan(reward) else float(reward) for reward in shaped]
            failures = {failure.index: failure.reason for failure in result.failures}
            scored = [
                msgspec.structs.replace(r, reward=reward, failure=failures.get(index))
                for index, (r, reward) in enumerate(zip(sampled.responses, rewards, strict=True))
            ]
            payload = msgspec.msgpack.encode(msgspec.structs.replace(sampled, responses=scored))
            self._pool.save_sampled(step, payload)
        return _SAMPLED.decode(self._world.broadcast(payload))

    def _shaped(self, rewards: np.ndarray, sampled: Sampled) -> np.ndarray:
        """The rewards that are trained on: less for responses that come near the limit, if so configured."""
        settings = self._config.reward
        if settings.overlong_buffer == 0:
            return rewards
        return less_overlong(
            rewards,
            np.array([response.length for response in sampled.responses]),
            limit=self._settings.rollout.max_response_tokens,
            buffer=settings.overlong_buffer,
            penalty=settings.overlong_penalty,
            lowest=settings.range[0],
        )


def complain(agent: str, result: RewardResult) -> None:
    """Tell on stderr what the verifier failed on."""
    if complaint := result.complaint():
        print(f"warning: agent {agent}: {complaint}", file=sys.stderr, flush=True)


def _hash(prompts: Sequence[Prompt]) -> str:
    return hash_prompts([prompt.id for prompt in prompts])


def _seed(*parts: int) -> int:
    """One independent seed per combination of parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
