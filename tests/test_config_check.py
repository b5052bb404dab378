"""What is looked at before any process is started: every refusal names its key, the numbers and a fix."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity_models import write_models

from megatron_hacpo.config import ConfigError, check, dump, load

TINY = Path(__file__).parent.parent / "examples" / "tiny"


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parent.parent)


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(load(TINY / "pair.yaml", overrides))
    return caught.value.lines


def test_the_example_is_fine_with_every_method() -> None:
    for method in ("hacpo", "gspo", "naive"):
        assert check(load(TINY / "pair.yaml", [f"algorithm.name={method}"])) == []


@pytest.mark.parametrize(
    "override, expected",
    [
        (
            "agents.A.parallel.tensor=3",
            "agents.A.parallel.tensor: 3: does not divide num_attention_heads = 4 of examples/tiny/A; "
            "use one of 1, 2",
        ),
        (
            "agents.A.parallel.tensor=4",
            "agents.A.parallel.tensor: 4: does not divide num_key_value_heads = 2 of examples/tiny/A; "
            "use one of 1, 2",
        ),
        (
            "agents.B.parallel.pipeline=4",
            "agents.B.parallel.pipeline: 4: does not divide num_hidden_layers = 2 of examples/tiny/B; "
            "use one of 1, 2",
        ),
        (
            "agents.A.parallel.virtual_pipeline=2",
            "agents.A.parallel.virtual_pipeline: 2: divides the stages of a pipeline, and pipeline is 1; "
            "leave it out or use more stages",
        ),
        (
            "agents.A.parallel={pipeline: 2, virtual_pipeline: 2}",
            "agents.A.parallel.virtual_pipeline: 2: pipeline x virtual_pipeline = 4 does not divide "
            "num_hidden_layers = 2; lower it",
        ),
        (
            "agents.A.parallel={data: 2, expert: 2}",
            "agents.A.parallel.expert: 2: examples/tiny/A is a qwen3 model, which has no experts; leave it "
            "out",
        ),
        (
            "batch.minibatch_prompts=5",
            "batch.minibatch_prompts: 5: does not divide batch.prompts = 16; use a divisor of 16",
        ),
        (
            "batch.microbatch_tokens=43",
            "batch.microbatch_tokens: 43: less than one sequence of agent B, up to 44 tokens (max_"
            "prompt_tokens + max_response_tokens); use at least 44",
        ),
        (
            "agents.A.rollout.max_response_tokens=225",
            "rollout.max_response_tokens: 225: with max_prompt_tokens 32 up to 257 tokens, and agent A's "
            "model reads 256 (max_position_embeddings); lower one of the two",
        ),
        (
            "reward.range=[-1, 1]",
            'algorithm.capability_metric: "mean": needs rewards from 0 up, reward.range is [-1.0, 1.0]; use '
            "positive_share",
        ),
        (
            "evaluation.prompts=10",
            "evaluation.prompts: 10: not a multiple of the 4 kinds of rule_arithmetic; round it",
        ),
        (
            "agents.logs={model: examples/tiny/A}",
            "agents.logs: the run's folder needs this name itself; rename the agent",
        ),
        (
            "agents.a={model: examples/tiny/A}",
            "agents.a: differs from agent A in case alone; agents are folders, rename one",
        ),
        (
            "agents.A.chat_template=none.jinja",
            'agents.A.chat_template: "none.jinja": no such file; give the path of a Jinja file',
        ),
        (
            "optimizer={schedule: cosine, warmup_steps: 240}",
            "optimizer.warmup_steps: 240: leaves no step of run.steps = 240 to the schedule; lower it",
        ),
        (
            "agents.A.optimizer={schedule: linear, min_lr: 1.0}",
            "agents.A.optimizer.min_lr: 1.0: above lr = 0.0002; lower it",
        ),
        (
            "agents.A={model: examples/tiny/A, dtype: bfloat16, optimizer: {cpu_offload: true}}",
            "agents.A.optimizer.cpu_offload: true: needs agents.A.optimizer.distributed; write true there",
        ),
        (
            "agents.A.optimizer={cpu_offload: true, distributed: true}",
            "agents.A.optimizer.cpu_offload: true: needs agents.A.dtype bfloat16 (megatron-core offloads no "
            "float32 models); change one",
        ),
        (
            "agents.A.rollout={engine: sglang}",
            "agents.A.rollout.sglang.python: null: which SGLang? name its environment's Python, or give "
            "addresses",
        ),
        (
            "agents.A.rollout={engine: sglang, sglang: {python: /no/python}}",
            'agents.A.rollout.sglang.python: "/no/python": no such program; give the interpreter of '
            "SGLang's environment",
        ),
        (
            "agents.A.rollout={engine: sglang, top_k: 1, sglang: {addresses: ['http://a:1']}}",
            "agents.A.rollout.top_k: 1: SGLang then gives log-probs at temperature 1; leave it out or use 2 "
            "or more",
        ),
        (
            "agents.A.placement.offload=all",
            'agents.A.placement.offload: "all": is for colocated servers; write colocated: true too',
        ),
        (
            "agents.A.placement.colocated=true",
            "agents.A.placement.colocated: true: is for servers; write rollout.engine: sglang, or leave it "
            "out",
        ),
        (
            "agents.A.router_aux_loss_coef=0.01",
            "agents.A.router_aux_loss_coef: 0.01: examples/tiny/A is a qwen3 model, which has no experts to "
            "balance; leave it out",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(override: str, expected: str) -> None:
    assert problems(override) == [expected]


def test_colocated_servers_that_cannot_be() -> None:
    sglang = "{addresses: ['http://a:1'], transport: distributed, servers: 2}"
    rollout = f"agents.A.rollout={{engine: sglang, sglang: {sglang}}}"
    assert problems(rollout, "agents.A.placement.colocated=true") == [
        'agents.A.rollout.sglang.addresses: ["http://a:1"]: servers of somebody else share no GPU with '
        "the trainer; leave placement.colocated out",
        'agents.A.rollout.sglang.transport: "distributed": NCCL allows no two processes on one GPU; use '
        "tensor or disk for colocated servers",
        "agents.A.rollout.sglang.servers: 2: with tensor 1 more GPUs than the agent's 1 processes have; "
        "lower one",
    ]


def test_an_environment_without_sglang_is_told() -> None:
    (told,) = problems(f"agents.A.rollout={{engine: sglang, sglang: {{python: {sys.executable}}}}}")
    assert told.endswith("has no SGLang; install sglang there or name another interpreter")


def test_missing_folder_names_the_key_and_where_it_was_sought() -> None:
    (line,) = problems("agents.B.model=examples/tiny/nobody")
    assert line.startswith('agents.B.model: "examples/tiny/nobody": no such folder in ')
    assert line.endswith("; give the path of a Hugging Face folder")


def test_all_mistakes_are_told_at_once() -> None:
    lines = problems("agents.B.model=none", "batch.minibatch_prompts=5", "reward.verifier=sharp")
    assert [line.split(":")[0] for line in lines] == [
        "agents.B.model",
        "batch.minibatch_prompts",
        "reward.verifier",
    ]


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        values = {key: value for key, value in (values | changes).items() if value != "gone"}
        (folder / name).write_text(json.dumps(values))

    return edit


def _cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-10]) and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _sharded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "damage, expected",
    [
        (_remove("config.json"), "has no config.json; give a complete Hugging Face folder"),
        (_cut("config.json"), "config.json is not JSON ("),
        (
            edit_json("config.json", model_type="gpt2"),
            "config.json: model_type: 'gpt2' is not supported; supported are",
        ),
        (edit_json("config.json", model_type="gone"), "config.json: model_type: None is not supported"),
        (
            edit_json("config.json", use_sliding_window=True),
            "config.json: use_sliding_window: True is not supported",
        ),
        (
            edit_json("config.json", num_hidden_layers="gone"),
            "config.json: num_hidden_layers is None; it must be",
        ),
        (
            edit_json("config.json", num_hidden_layers=1),
            "model.layers.1.input_layernorm.weight is [48] in model.safetensors and absent by config.json",
        ),
        (
            edit_json("config.json", tie_word_embeddings=False),
            "lm_head.weight is absent and config.json does not say tie_word_embeddings: true; use the",
        ),
        (
            edit_json("config.json", num_key_value_heads=3),
            "config.json: num_key_value_heads is 3; it must divide num_attention_heads = 4",
        ),
        (
            edit_json("config.json", vocab_size=18),
            "model.embed_tokens.weight is [19, 48] in model.safetensors and [18, 48] by config.json",
        ),
        (
            _remove("model.safetensors"),
            "has no model.safetensors; give a folder with all its safetensors files",
        ),
        (_sharded, "has no two.safetensors, which model.safetensors.index.json names; fetch the folder"),
        (_cut("model.safetensors"), "model.safetensors is cut off: model.norm.weight ends at byte 246,928"),
        (_remove("tokenizer.json"), "has no tokenizer.json; save a fast tokenizer there with transformers"),
        (_cut("tokenizer.json"), "tokenizer.json cannot be read ("),
        (
            _remove("chat_template.jinja"),
            'has no chat template; add plain_template: "{prompt}" or name a Jinja file',
        ),
    ],
)
def test_a_damaged_model_folder_is_one_line(
    tmp_path: Path, damage: Callable[[Path], None], expected: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY / "A", folder)
    assert check(load(TINY / "pair.yaml", [f"agents.A.model={folder}"])) == []
    damage(folder)
    (line,) = problems(f"agents.A.model={folder}")
    assert line.startswith(("agents.A.model: ", "agents.A.plain_template: "))
    assert expected in line


def test_a_plain_template_replaces_a_missing_chat_template(tmp_path: Path) -> None:
    shutil.copytree(TINY / "A", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    overrides = [f"agents.A.model={tmp_path / 'model'}", "agents.A.plain_template='{prompt}'"]
    assert check(load(TINY / "pair.yaml", overrides)) == []


def test_a_closing_window_is_refused_and_a_narrow_one_warned_of() -> None:
    (line,) = problems("algorithm.delta=0.2", "algorithm.delta_step=0.1")
    assert line.startswith("algorithm.delta_step: 0.1 closes the clipping window")
    assert "use at most" in line
    (warning,) = check(load(TINY / "pair.yaml", ["algorithm.delta=0.2", "algorithm.delta_step=0.06"]))
    assert warning.startswith("algorithm.delta_step: 0.06 leaves a window of 0.02")


@pytest.mark.parametrize(
    "override", ["algorithm.name=gspo", "algorithm.name=naive", "algorithm.cross_clip=none", "agents.B=null"]
)
def test_the_window_matters_only_where_it_is_used(override: str) -> None:
    warnings = check(load(TINY / "pair.yaml", ["algorithm.delta=0.2", "algorithm.delta_step=0.1", override]))
    assert not any("window" in warning for warning in warnings)


@pytest.mark.parametrize("name", ["hacpo", "gspo", "grpo", "naive"])
@pytest.mark.parametrize("ran", ["hacpo", "grpo", "naive"])
def test_another_method_on_a_resolved_file_is_that_method(ran: str, name: str, tmp_path: Path) -> None:
    """Every method of a run's config.yaml is as on the file that the run was started from."""
    resolved = tmp_path / "config.yaml"
    resolved.write_text(dump(load(TINY / "pair.yaml", [f"algorithm.name={ran}"])))
    assert load(resolved, [f"algorithm.name={name}"]) == load(TINY / "pair.yaml", [f"algorithm.name={name}"])


def test_ablations_are_named() -> None:
    (warning,) = check(load(TINY / "pair.yaml", ["algorithm.capability_baseline=false"]))
    assert warning == "algorithm.capability_baseline: False: an ablation; hacpo by itself has True"


def test_five_agents_with_the_papers_window_are_refused() -> None:
    more = [f"agents.{name}={{model: examples/tiny/A}}" for name in "CDE"]
    (line,) = problems("algorithm.delta=0.2", *more)
    assert "m = 9" in line


def test_a_lonely_response_has_no_advantage() -> None:
    expected = (
        "rollout.responses_per_prompt: 1: gives agent A a single response per prompt and so no advantage; "
        "use at least 2"
    )
    assert problems("rollout.responses_per_prompt=1", "agents.B=null") == [expected]
    assert check(load(TINY / "pair.yaml", ["rollout.responses_per_prompt=1"])) == []


def test_a_custom_verifier_must_exist() -> None:
    assert check(load(TINY / "pair.yaml", ["reward.verifier=operator:eq"])) == []
    (line,) = problems("reward.verifier=no_such_module:check")
    assert line.startswith("reward.verifier: no module 'no_such_module'")


@pytest.mark.parametrize(
    "content, expected",
    [
        (None, "cannot be read (No such file or directory); give the path of a file or folder of prompts"),
        ("", "prompts.jsonl: holds no prompts"),
        ('{"prompt": "1+1="}\n', "'answer' is missing"),
        ("{\n", "prompts.jsonl:1: "),
    ],
)
def test_a_bad_data_file_is_one_line(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    (line,) = problems("data.task=null", f"data.path={path}")
    assert line.startswith("data.path: ")
    assert expected in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("evaluation.benchmarks.math={}", "evaluation.benchmarks.math.path: missing"),
        ("evaluation.benchmarks.math={path: nowhere.jsonl}", 'math.path: "nowhere.jsonl": cannot be read'),
        (
            "evaluation.benchmarks.math={path: FILE, samples: 4}",
            "math.samples: 4: greedy responses to a prompt",
        ),
        (
            "evaluation.benchmarks.math={path: FILE, samples: 4, temperature: 1.0, pass_at: [1, 8]}",
            "math.pass_at: 8: needs as many responses, samples is 4; raise that or lower k",
        ),
        ("evaluation.benchmarks.math={path: FILE, verifier: maths}", "evaluation.benchmarks.math: "),
        ("evaluation.benchmarks.greedy={path: FILE}", "evaluation.benchmarks.greedy: the held-out prompts"),
        ("evaluation.benchmarks.math={path: FILE, template: x}", 'math.template: "x": needs {prompt} once'),
        (
            "evaluation.benchmarks.math={path: FILE, max_response_tokens: 9999}",
            "math.max_response_tokens: 9999: with the prompt up to 10031 tokens, and agent A's model reads",
        ),
        (
            "evaluation.benchmarks.math={path: FILE, verifier: {exact: 1.0, match: 0.2}}",
            "the weights add up to more than 1, the highest reward of a benchmark; lower them",
        ),
        ("evaluation.benchmarks.math={path: FILE, temperature: 1e-5}", "math.temperature: 1e-05: too low"),
        ("evaluation.benchmarks.math={path: FILE, pass_at: 1}", "math.pass_at: 1: not a list; write [a, b]"),
        (
            "reward.overlong_buffer=13",
            "reward.overlong_buffer: 13: more than agent A's rollout.max_response_t",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}\n')
    with pytest.raises(ConfigError) as error:
        check(load(TINY / "pair.yaml", [override.replace("FILE", str(file))]))
    assert expected in error.value.lines[0]


def test_a_jsonl_run_without_held_out_prompts_warns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": {n + 1}}}\n' for n in range(16)))
    overrides = ["data.task=null", f"data.path={path}"]
    assert check(load(TINY / "pair.yaml", overrides)) == [
        "evaluation.path: not set: no accuracy is measured; name a file of held-out prompts"
    ]
    assert check(load(TINY / "pair.yaml", [*overrides, f"evaluation.path={path}"])) == []
    assert check(load(TINY / "pair.yaml", [*overrides, "evaluation.prompts=0"])) == []


def test_grpo_with_sequence_sized_clips_warns() -> None:
    (warning,) = check(load(TINY / "pair.yaml", ["algorithm.name=grpo"]))
    assert warning.startswith("algorithm.clip_low, clip_high: 0.003, 0.004: narrow for ratios per token")


def test_wandb_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = problems("report.wandb=true")
    assert line.startswith("report.wandb: true: wandb is not installed")


@pytest.mark.parametrize(
    "parallel, expected",
    [
        ("{data: 3, expert: 2}", "expert: 2: does not divide tensor x context x data = 3, which share the"),
        ("{data: 3, expert: 3}", "expert: 3: does not divide the number of experts = 4"),
        ("{tensor: 2}", "expert: 1: under tensor = 2 experts must be divided too; use 2 or more"),
        ("{tensor: 2, expert: 2, sequence: false}", "sequence: false: experts under tensor parallelism need"),
    ],
)
def test_what_experts_cannot_do_is_refused(
    parallel: str, expected: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    lines = problems(f"agents.A.model={folder / 'experts'}", f"agents.A.parallel={parallel}")
    assert lines[0].startswith(f"agents.A.parallel.{expected}")
    for fine in ("{data: 2, expert: 2}", "{tensor: 2, expert: 2}", "{tensor: 2, context: 2, expert: 4}"):
        settings = [f"agents.A.model={folder / 'experts'}", f"agents.A.parallel={fine}"]
        assert check(load(TINY / "pair.yaml", settings)) == []
