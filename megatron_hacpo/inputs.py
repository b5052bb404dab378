"""Prompts and tokenizers of a run: the same for every agent and every process."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import AgentConfig, RunConfig
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.source import PromptSource, open_source
from megatron_hacpo.reward.pool import RewardPool


def load_tokenizers(config: RunConfig) -> dict[str, AgentTokenizer]:
    """Every agent's tokenizer, by agent name."""
    return {name: _tokenizer(agent) for name, agent in config.agents.items()}


def open_prompts(config: RunConfig, tokenizers: Mapping[str, AgentTokenizer]) -> PromptSource:
    """The run's prompts, without those that are too long for any agent."""

    def lengths(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
        return {
            name: [_token_count(prompt, name, tokenizer) for prompt in prompts]
            for name, tokenizer in tokenizers.items()
        }

    return open_source(
        seed=config.run.seed,
        batch_size=config.batch.prompts,
        lengths=lengths,
        max_prompt_tokens={name: a.rollout.max_prompt_tokens for name, a in config.agents.items()},
        task=config.data.task,
        digits=config.data.digits,
        path=config.data.path,
        prompt_key=config.data.prompt_key,
        answer_key=config.data.answer_key,
        eval_prompts=config.evaluation.prompts,
        eval_path=config.evaluation.path,
    )


def _token_count(prompt: Prompt, agent: str, tokenizer: AgentTokenizer) -> int:
    """Tokens of a rendered prompt; ValueError if the agent would read something else than what it says."""
    if lost := tokenizer.lost_characters(prompt.messages):
        raise ValueError(
            f"prompt {prompt.id}: agent {agent}'s vocabulary has no token for {lost!r}; "
            "remove the prompt or change it"
        )
    count = len(tokenizer.render_prompt(prompt.messages))
    if count == 0:
        raise ValueError(f"prompt {prompt.id}: no tokens for agent {agent}; remove the prompt or change it")
    return count


def _tokenizer(agent: AgentConfig) -> AgentTokenizer:
    template = None if agent.chat_template is None else Path(agent.chat_template).read_text("utf-8")
    return AgentTokenizer.load(
        agent.model,
        chat_template=template,
        plain_template=agent.plain_template,
        stop_token=agent.stop_token,
    )


def open_pool(config: RunConfig) -> RewardPool:
    """The run's verifier in worker processes of this one."""
    reward = config.reward
    return RewardPool(
        reward.verifier,
        reward_range=reward.range,
        workers=reward.workers,
        deadline=reward.deadline_seconds,
        memory_mb=reward.memory_mb,
        on_failure=reward.on_failure,
        truncated=reward.truncated,
    )
