"""Whether an agent's Hugging Face folder fits its configuration, from the files alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_hacpo.config.errors import line
from megatron_hacpo.config.schema import AgentConfig


def model_problems(name: str, agent: AgentConfig) -> Iterator[str]:
    """What is wrong with the folder of agent `name`, one line each."""
    key, folder = ("agents", name, "model"), Path(agent.model)
    if not folder.is_dir():
        yield line(
            key, agent.model, f"no such folder in {Path.cwd()}; give the path of a Hugging Face folder"
        )
        return
    try:
        hf = _read_json(folder / "config.json")
        _check_family(hf)
        _check_weights(folder, hf)
        vocabulary = _tokenizer_size(folder)
    except ValueError as error:
        yield line(key, agent.model, str(error))
        return
    if vocabulary > hf["vocab_size"]:
        yield line(
            key,
            agent.model,
            f"tokenizer.json has {vocabulary} token ids, config.json has vocab_size {hf['vocab_size']}; "
            "use the tokenizer that belongs to the model",
        )
    yield from _layout_problems(name, agent, hf)
    yield from _length_problems(name, agent, hf)
    yield from _template_problems(name, agent, folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"has no {path.name}; give a complete Hugging Face folder") from None
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{path.name} is not JSON ({error}); fetch the folder again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object; fetch the folder again")
    return value


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def _check_family(hf: dict[str, Any]) -> None:
    from megatron_hacpo.families import family_of

    try:
        family_of(SimpleNamespace(**{"model_type": None, **hf}))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    for size in _SIZES:
        if not isinstance(hf.get(size), int) or hf[size] < 1:
            raise ValueError(f"config.json: {size} is {hf.get(size)!r}; it must be a whole number above 0")
    groups = hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
    if not isinstance(groups, int) or groups < 1 or hf["num_attention_heads"] % groups:
        raise ValueError(
            f"config.json: num_key_value_heads is {groups!r}; it must divide "
            f"num_attention_heads = {hf['num_attention_heads']}"
        )


def _check_weights(folder: Path, hf: dict[str, Any]) -> None:
    """ValueError unless the safetensors files hold exactly the tensors that config.json implies."""
    from safetensors import SafetensorError, safe_open

    from megatron_hacpo.families import tensor_shapes

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise ValueError(f"{index.name} has no weight_map of names to files; fetch it again")
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing or not files:
        shown = (
            f"{missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}" if missing else "weights"
        )
        raise ValueError(f"has no {shown}; give a folder with all its safetensors files")
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="np") as tensors:
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}); fetch it again") from None
    expected = tensor_shapes(SimpleNamespace(**hf))
    for name in [*expected, *found]:
        if name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints hold
            continue
        if found.get(name) != expected.get(name):
            raise ValueError(
                f"{name} is {_shape(found.get(name))} in the safetensors files and "
                f"{_shape(expected.get(name))} by config.json; "
                "use the config.json that belongs to the weights"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


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


def _layout_problems(name: str, agent: AgentConfig, hf: dict[str, Any]) -> Iterator[str]:
    heads = hf["num_attention_heads"]
    split_by_tensor = {
        "num_attention_heads": heads,
        "num_key_value_heads": hf["num_key_value_heads"],
        "intermediate_size": hf["intermediate_size"],
    }
    split_by_pipeline = {"num_hidden_layers": hf["num_hidden_layers"]}
    for axis, split in (("tensor", split_by_tensor), ("pipeline", split_by_pipeline)):
        size = getattr(agent.parallel, axis)
        common = math.gcd(*split.values())
        for field, value in split.items():
            if value % size:
                choices = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
                wrong = f"does not divide {field} = {value} of {agent.model}; use one of {choices}"
                yield line(("agents", name, "parallel", axis), size, wrong)
                break


def _length_problems(name: str, agent: AgentConfig, hf: dict[str, Any]) -> Iterator[str]:
    rollout, limit = agent.rollout, hf["max_position_embeddings"]
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
    own = settings.is_file() and _read_json(settings).get("chat_template")
    if not own and not any(
        (folder / file).is_file() for file in ("chat_template.jinja", "chat_template.json")
    ):
        yield (
            f"agents.{name}.plain_template: missing: {folder} has no chat template; "
            'add plain_template: "{prompt}" or name a Jinja file as chat_template'
        )
