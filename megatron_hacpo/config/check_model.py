"""Whether an agent's Hugging Face folder fits its configuration, from the files alone."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_hacpo.config.errors import line
from megatron_hacpo.config.schema import AgentConfig
from megatron_hacpo.hf.families import divided_sizes, expert_count
from megatron_hacpo.hf.read import HFWeights, is_checkpoint, read_config, read_json


def model_problems(name: str, agent: AgentConfig) -> Iterator[str]:
    """What is wrong with the folder of agent `name`, one line each."""
    key, folder = ("agents", name, "model"), Path(agent.model)
    if not folder.is_dir():
        yield line(
            key, agent.model, f"no such folder in {Path.cwd()}; give the path of a Hugging Face folder"
        )
        return
    try:
        hf = read_config(folder)
        if not is_checkpoint(folder):
            HFWeights(folder).check(hf)
        vocabulary = _tokenizer_size(folder)
    except ValueError as error:
        yield line(key, agent.model, str(error))
        return
    if vocabulary > hf.vocab_size:
        yield line(
            key,
            agent.model,
            f"tokenizer.json has {vocabulary} token ids, config.json has vocab_size {hf.vocab_size}; "
            "use the tokenizer that belongs to the model",
        )
    yield from _layout_problems(name, agent, hf)
    yield from _length_problems(name, agent, hf)
    yield from _template_problems(name, agent, folder)


def _tokenizer_size(folder: Path) -> int:
    """Largest token id plus one."""
    from tokenizers import Tokenizer

    if not (folder / "tokenizer.json").is_file():
        raise ValueError("has no tokenizer.json; save a fast tokenizer there with transformers")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"tokenizer.json cannot be read ({error}); fetch it again") from None
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _layout_problems(name: str, agent: AgentConfig, hf: Any) -> Iterator[str]:
    parallel = agent.parallel
    ranks = parallel.tensor * parallel.context * parallel.data
    if parallel.expert > 1 and not expert_count(hf):
        wrong = f"{agent.model} is a {hf.model_type} model, which has no experts; leave it out"
        yield line(("agents", name, "parallel", "expert"), parallel.expert, wrong)
        return
    if agent.router_aux_loss_coef and not expert_count(hf):
        wrong = f"{agent.model} is a {hf.model_type} model, which has no experts to balance; leave it out"
        yield line(("agents", name, "router_aux_loss_coef"), agent.router_aux_loss_coef, wrong)
    if ranks % parallel.expert:
        wrong = f"does not divide tensor x context x data = {ranks}, which share the experts; use a divisor"
        yield line(("agents", name, "parallel", "expert"), parallel.expert, wrong)
    if expert_count(hf) and parallel.tensor > 1:
        # Megatron refuses the one and computes something else with the other.
        if not parallel.sequence:
            wrong = "experts under tensor parallelism need sequence parallelism; write true"
            yield line(("agents", name, "parallel", "sequence"), False, wrong)
        if parallel.expert == 1:
            wrong = f"under tensor = {parallel.tensor} experts must be divided too; use 2 or more"
            yield line(("agents", name, "parallel", "expert"), 1, wrong)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        wrong = "divides the stages of a pipeline, and pipeline is 1; leave it out or use more stages"
        yield line(("agents", name, "parallel", "virtual_pipeline"), parallel.virtual_pipeline, wrong)
    layers, parts = hf.num_hidden_layers, parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1 and layers % parts:
        wrong = f"pipeline x virtual_pipeline = {parts} does not divide num_hidden_layers = {layers}"
        yield line(
            ("agents", name, "parallel", "virtual_pipeline"), parallel.virtual_pipeline, f"{wrong}; lower it"
        )
    for axis, sizes in divided_sizes(hf).items():
        size = getattr(parallel, axis)
        common = math.gcd(*sizes.values())
        for field, value in sizes.items():
            if value % size:
                choices = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
                wrong = f"does not divide {field} = {value} of {agent.model}; use one of {choices}"
                yield line(("agents", name, "parallel", axis), size, wrong)
                break


def _length_problems(name: str, agent: AgentConfig, hf: Any) -> Iterator[str]:
    rollout, limit = agent.rollout, hf.max_position_embeddings
    total = rollout.max_tokens
    if total > limit:
        yield line(
            "rollout.max_response_tokens",
            rollout.max_response_tokens,
            f"with max_prompt_tokens {rollout.max_prompt_tokens} up to {total} tokens, and agent {name}'s "
            f"model reads {limit} (max_position_embeddings); lower one of the two",
        )


def _template_problems(name: str, agent: AgentConfig, folder: Path) -> Iterator[str]:
    if agent.chat_template is not None and not Path(agent.chat_template).is_file():
        yield line(
            ("agents", name, "chat_template"),
            agent.chat_template,
            "no such file; give the path of a Jinja file",
        )
    if agent.chat_template is not None or agent.plain_template is not None:
        return
    settings = folder / "tokenizer_config.json"
    own = settings.is_file() and read_json(settings).get("chat_template")
    if not own and not any(
        (folder / file).is_file() for file in ("chat_template.jinja", "chat_template.json")
    ):
        yield (
            f"agents.{name}.plain_template: missing: {folder} has no chat template; "
            'add plain_template: "{prompt}" or name a Jinja file as chat_template'
        )
