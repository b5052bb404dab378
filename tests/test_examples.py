"""The files under examples/: they load, say what they claim, and fit the models and machines they name."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hacpo.algorithm.minibatch import check_window
from megatron_hacpo.config import ConfigError, RunConfig, check, load
from megatron_hacpo.hf.families import divided_sizes
from megatron_hacpo.launch.placement import Node, nodes_needed, place

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PAPER = EXAMPLES / "paper"
GPUS = 8
"""Of a node."""

PAIRS = {
    "qwen4b_qwen4b_instruct": (["Qwen3-4B", "Qwen3-4B-Instruct-2507"], 3.0, 0.8, 0.01),
    "qwen1.7b_qwen4b": (["Qwen3-1.7B-Base", "Qwen3-4B-Base"], 1.0, 0.8, 0.025),
    "qwen4b_qwen8b": (["Qwen3-4B-Base", "Qwen3-8B-Base"], 3.0, 0.8, 0.025),
    "llama1b_llama3b": (["Llama-3.2-1B-Instruct", "Llama-3.2-3B-Instruct"], 1.0, 0.9, 0.01),
    "qwen1.7b_llama1b": (["Qwen3-1.7B-Base", "Llama-3.2-1B-Instruct"], 1.0, 0.8, 0.025),
    "qwen4b_llama3b": (["Qwen3-4B-Base", "Llama-3.2-3B-Instruct"], 1.0, 0.8, 0.025),
}
"""The paper's: models, alpha, lower bound of the cross ratio before the first update, and its rise."""

SHAPES = {
    # heads, key-value heads, feed-forward width, layers, longest sequence
    "Qwen3-1.7B-Base": ("qwen3", 16, 8, 6144, 28, 32_768),
    "Qwen3-4B": ("qwen3", 32, 8, 9728, 36, 40_960),
    "Qwen3-4B-Base": ("qwen3", 32, 8, 9728, 36, 32_768),
    "Qwen3-4B-Instruct-2507": ("qwen3", 32, 8, 9728, 36, 262_144),
    "Qwen3-8B-Base": ("qwen3", 32, 8, 12_288, 36, 32_768),
    "Qwen2.5-7B-Instruct": ("qwen2", 28, 4, 18_944, 28, 32_768),
    "Llama-3.1-8B-Instruct": ("llama", 32, 8, 14_336, 32, 131_072),
    "Llama-3.2-1B-Instruct": ("llama", 32, 8, 8192, 16, 131_072),
    "Llama-3.2-3B-Instruct": ("llama", 24, 8, 8192, 28, 131_072),
    "Mistral-7B-Instruct-v0.3": ("mistral", 32, 8, 14_336, 32, 32_768),
}
"""Of the models' public config.json."""

FILES = sorted(EXAMPLES.rglob("*.yaml"))
PAPER_FILES = sorted(PAPER.glob("*.yaml"))
MULTI_NODE = sorted(PAPER.glob("*nodes.yaml"))
ONE_NODE = [file for file in PAPER_FILES if file not in MULTI_NODE and load(file).rollout.engine == "sglang"]


def name_of(file: Path) -> str:
    return file.relative_to(EXAMPLES).with_suffix("").as_posix()


def shape(model: str) -> SimpleNamespace:
    """What a public config.json says, as far as the sizes depend on it."""
    family, heads, key_value_heads, ffn, layers, positions = SHAPES[Path(model).name]
    return SimpleNamespace(
        model_type=family,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        sliding_window=None,
    )


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_it_loads_and_only_what_must_be_fetched_is_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT if file.is_relative_to(EXAMPLES / "tiny") else tmp_path)
    config = load(file)
    missing = ("no such folder", "no such program", "No such file or directory")
    try:
        assert check(config) == []
        problems = []
    except ConfigError as error:
        problems = error.lines
    assert [line for line in problems if not any(words in line for words in missing)] == []
    if file.is_relative_to(EXAMPLES / "tiny"):
        assert problems == []


@pytest.mark.parametrize("file", PAPER_FILES, ids=name_of)
def test_sizes_and_lengths_fit_the_models(file: Path) -> None:
    config = load(file)
    for name, agent in config.agents.items():
        hf, parallel = shape(agent.model), agent.parallel
        for axis, fields in divided_sizes(hf).items():
            for field, value in fields.items():
                assert value % getattr(parallel, axis) == 0, (name, axis, field)
        assert hf.num_hidden_layers % (parallel.pipeline * parallel.virtual_pipeline) == 0, name
        assert config.longest(name) <= hf.max_position_embeddings, name
        is_base = agent.model.endswith("-Base")
        assert (agent.plain_template is not None) == is_base, name


def test_all_of_the_papers_pairs_are_here() -> None:
    assert {file.stem for file in ONE_NODE} == {*PAIRS, "trio"}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_has_the_papers_numbers(pair: str) -> None:
    models, alpha, bound, delta_step = PAIRS[pair]
    config = load(PAPER / f"{pair}.yaml")
    assert [Path(agent.model).name for agent in config.agents.values()] == models
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.alpha, algorithm.delta_step) == ("hacpo", alpha, delta_step)
    assert 1.0 - algorithm.delta == pytest.approx(bound, abs=1e-12)
    assert_the_papers_defaults(config)


def assert_the_papers_defaults(config: RunConfig) -> None:
    """What the paper has for all its pairs."""
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (3e-4, 4e-4, 1e-3)
    assert (algorithm.capability_window, algorithm.cross_clip, algorithm.cross_window) == (
        5,
        "stepwise",
        "fixed",
    )
    assert (config.batch.prompts, config.batch.minibatch_prompts) == (128, 64)
    assert config.run.steps == 7500 // 128
    assert config.reward.verifier == "boxed"
    for agent in config.agents.values():
        rollout, optimizer = agent.rollout, agent.optimizer
        assert (rollout.responses_per_prompt, rollout.temperature, rollout.top_p) == (8, 1.0, 1.0)
        assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (1024, 4096)
        assert (optimizer.lr, optimizer.schedule, optimizer.warmup_steps) == (1e-6, "constant", 0)
        assert (optimizer.clip_grad, optimizer.betas, optimizer.weight_decay) == (1.0, (0.9, 0.999), 0.01)


@pytest.mark.parametrize("file", [PAPER / "trio.yaml", *MULTI_NODE], ids=name_of)
def test_the_others_have_the_numbers_of_two_families(file: Path) -> None:
    config = load(file)
    algorithm = config.algorithm
    assert (algorithm.alpha, algorithm.delta, algorithm.delta_step) == (1.0, 0.2, 0.025)
    assert_the_papers_defaults(config)
    families = {shape(agent.model).model_type for agent in config.agents.values()}
    assert len(families) == len(config.agents)
    batch = config.batch
    window = check_window(
        len(config.agents),
        batch.prompts,
        batch.minibatch_prompts,
        algorithm.delta,
        algorithm.delta_step,
    )
    assert window is None


@pytest.mark.parametrize("file", ONE_NODE, ids=name_of)
def test_one_node_is_exactly_used(file: Path) -> None:
    placements = place(load(file), [Node("node", GPUS)])
    devices = [block.first + i for p in placements for block in p.ranks for i in range(block.count)]
    assert sorted(devices) == list(range(GPUS))
    for placement in placements:
        (block,) = placement.ranks
        servers = [server.first + i for server in placement.servers for i in range(server.count)]
        assert servers == list(range(block.first, block.first + block.count)), placement.agent


@pytest.mark.parametrize("file", MULTI_NODE, ids=name_of)
def test_nodes_are_exactly_used(file: Path) -> None:
    config = load(file)
    found = re.search(r"_(\d+)nodes$", file.stem)
    assert found is not None
    nodes = [Node(f"node{i}", GPUS) for i in range(int(found[1]))]
    placements = place(config, nodes)
    devices = [(b.node.name, b.first + i) for p in placements for b in p.ranks for i in range(b.count)]
    assert sorted(devices) == [(node.name, i) for node in nodes for i in range(GPUS)]
    for placement in placements:
        agent = config.agents[placement.agent]
        servers = [(b.node.name, b.first + i) for b in placement.servers for i in range(b.count)]
        own = [(b.node.name, b.first + i) for b in placement.ranks for i in range(b.count)]
        assert servers == own, placement.agent
        assert (agent.dtype, agent.optimizer.distributed, agent.recompute) == ("bfloat16", True, "full")
    assert nodes_needed(config, GPUS) == len(nodes)


def test_multi_node_examples_are_here() -> None:
    assert [file.stem for file in MULTI_NODE] == ["qwen7b_llama8b_2nodes", "qwen7b_llama8b_4nodes"]


@pytest.mark.parametrize("file", [*ONE_NODE, *MULTI_NODE], ids=name_of)
def test_the_head_says_how_to_run_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    head = text.partition("run:\n")[0]
    own = file.relative_to(ROOT).as_posix()
    assert all(line.startswith("# ") for line in head.splitlines())
    commands = [f"hacpo launch {own}\n", f"slurm/hacpo_multinode.sh {own}\n"]
    assert any(command in head for command in commands)
    names = re.findall(r"[\w.]+\.yaml", head)
    assert all((PAPER / name).is_file() for name in names)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 125
    assert load(file).run.name.replace("paper-", "").replace("-", "_") == file.stem
