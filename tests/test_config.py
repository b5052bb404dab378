"""From YAML and overrides to a RunConfig: values, presets, and one line for every mistake."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hacpo.config import ConfigError, RunConfig, dump, load, resolve, yaml12

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "examples" / "tiny" / "pair.yaml"


def minimal(**sections: Any) -> dict[str, Any]:
    return {
        "run": {"name": "test", "steps": 3},
        "agents": {"A": {"model": "somewhere"}},
        "data": {"task": "rule_arithmetic"},
        **sections,
    }


def lines_of(raw: Any, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(raw, overrides)
    return caught.value.lines


def test_paper_numbers_are_the_defaults() -> None:
    config = resolve(minimal())
    a = config.algorithm
    assert (a.name, a.alpha, a.delta, a.delta_step, a.clip_low, a.clip_high) == (
        "hacpo",
        1,
        0.2,
        0.025,
        3e-4,
        4e-4,
    )
    assert (a.capability_window, a.log_ratio_clamp, a.kl_coef) == (5, 10.0, 1e-3)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.clip_grad) == (
        1e-6,
        0.01,
        1.0,
    )
    assert (config.batch.prompts, config.batch.minibatch_prompts, config.batch.minibatches) == (128, 64, 2)
    assert (config.rollout.responses_per_prompt, config.rollout.temperature) == (8, 1.0)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["algorithm.name=grpo"], {"own_ratio": "token", "clip_low": 0.2, "clip_high": 0.28, "share": False}),
        (
            ["algorithm.name=gspo"],
            {"own_ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "share": False},
        ),
        (
            ["algorithm.name=naive"],
            {
                "capability_baseline": False,
                "discrepancy_gradient": False,
                "cross_clip": "surrogate",
                "share": True,
            },
        ),
        (["algorithm.name=grpo", "algorithm.clip_high=0.3"], {"clip_low": 0.2, "clip_high": 0.3}),
        (
            ["algorithm.capability_baseline=false"],
            {"capability_baseline": False, "discrepancy_gradient": True},
        ),
        (
            ["algorithm.discrepancy_gradient=false"],
            {"capability_baseline": True, "discrepancy_gradient": False},
        ),
        (["algorithm.alpha=3"], {"alpha": 3.0}),
        (["algorithm.delta_step=0"], {"delta_step": 0.0}),
        (["algorithm.cross_clip=none"], {"cross_clip": "none"}),
        (["algorithm.log_ratio_clamp=null"], {"log_ratio_clamp": None}),
    ],
)
def test_every_method_is_configuration_alone(overrides: list[str], expected: dict[str, Any]) -> None:
    algorithm = resolve(minimal(), overrides).algorithm
    assert {key: getattr(algorithm, key) for key in expected} == expected


def test_method_replaces_method_on_the_example_and_explicit_keys_stay() -> None:
    algorithm = load(PAIR, ["algorithm.name=gspo"]).algorithm
    assert (algorithm.share, algorithm.delta, algorithm.clip_low) == (False, 0.6, 3e-3)


def test_agents_override_single_keys_of_optimizer_and_rollout() -> None:
    config = load(PAIR, ["agents.B.optimizer.lr=1e-5", "agents.B.rollout={temperature: 0.7}"])
    a, b = config.agents["A"], config.agents["B"]
    assert a.optimizer == config.optimizer
    assert a.rollout == config.rollout
    assert b.optimizer == config.optimizer.model_copy(update={"lr": 1e-5})
    assert b.rollout == config.rollout.model_copy(update={"temperature": 0.7})


def test_logprob_gap_follows_the_dtype() -> None:
    config = load(PAIR, ["agents.B.dtype=bfloat16"])
    assert [agent.max_logprob_gap for agent in config.agents.values()] == [1e-3, 0.05]
    assert load(PAIR, ["rollout.max_logprob_gap=0.2"]).agents["A"].max_logprob_gap == 0.2


def test_agents_are_added_and_taken_out_by_override() -> None:
    assert load(PAIR, ["agents.B=null"]).names == ["A"]
    assert load(PAIR, ["agents.C={model: examples/tiny/A}"]).names == ["A", "B", "C"]


def test_config_does_not_change_after_loading() -> None:
    config = load(PAIR)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["agents.B.optimizer.lr=1e-5", "agents.A.parallel.tensor=2"],
        ["algorithm.name=grpo", "run.name='1e5'"],
    ],
)
def test_dump_is_read_back_and_keeps_only_real_overrides(overrides: list[str]) -> None:
    config = load(PAIR, overrides)
    text = dump(config)
    assert resolve(yaml12.parse(text)) == config
    assert resolve(yaml12.parse(text), ["rollout.temperature=0.5"]).agents["A"].rollout.temperature == 0.5


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text("aeEnox-+.:0159 #'~=\n"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ax1-", min_size=1), inner),
        max_leaves=8,
    )
)
def test_yaml_round_trip(value: Any) -> None:
    assert yaml12.parse(yaml12.write({"key": value})) == {"key": value}


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-6", 1e-6),
        ("on", "on"),
        ("no", "no"),
        ("010", 10),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("-3", -3),
        (".5", 0.5),
        ("0x10", 16),
        ("'7'", "7"),
    ],
)
def test_scalars_mean_what_people_expect(text: str, value: object) -> None:
    parsed = yaml12.parse(f"key: {text}")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


BAD_VALUES = [
    ("optimizer.lr=fast", 'optimizer.lr: "fast": not a number; write it plainly, such as 1e-6'),
    ("optimizer.lr='1e-6'", 'optimizer.lr: "1e-6": not a number; write it plainly, such as 1e-6'),
    ("optimizer.lr=0", "optimizer.lr: 0: must be above 0; raise it"),
    ("optimizer.lr=.nan", "optimizer.lr: NaN: not a finite number; write a finite one"),
    ("optimizer.betas=[0.9]", "optimizer.betas: [0.9]: not a list of two numbers; write [a, b]"),
    ("optimizer.betas=[0.9, 1]", "optimizer.betas[1]: 1: must be below 1; lower it"),
    ("optimizer=3", "optimizer: 3: not a section; write its keys below it, indented"),
    ("run.steps=2.5", "run.steps: 2.5: not a whole number; write it plainly, such as 8"),
    ("run.steps=true", "run.steps: true: not a whole number; write it plainly, such as 8"),
    ("run.name=5", "run.name: 5: not text; put it in quotes"),
    (
        "run.name=../up",
        'run.name: "../up": not a safe folder name; use letters, digits, `_`, `-` and inner dots',
    ),
    ("report.tensorboard=on", 'report.tensorboard: "on": not a truth value; write true or false'),
    ("agents.A.dtype=bf16", 'agents.A.dtype: "bf16": not one of float32, bfloat16; did you mean bfloat16?'),
    (
        "algorithm.name=GSPO",
        'algorithm.name: "GSPO": not one of hacpo, gspo, grpo, naive; did you mean gspo?',
    ),
    ("reward.range=[1, 0]", "reward.range: [1, 0]: does not rise; write it as [smallest, largest]"),
    ("rollout.temperature=0", "rollout.temperature: 0: must be at least 0.01; raise it"),
    ("agents={}", "agents: {}: empty; name at least one agent"),
    ("agents.A.model=null", "agents.A.model: null: not text; put it in quotes"),
    ("agents.C={}", "agents.C.model: missing; add it"),
    (
        "agents.A.plain_template=Q",
        'agents.A.plain_template: "Q": needs {prompt} once; put it where the prompt goes',
    ),
    (
        "data.task=null",
        "data: exactly one of task and path is needed; set the other one to null",
    ),
    ("agents.A.optimizer.lr=x", 'agents.A.optimizer.lr: "x": not a number; write it plainly, such as 1e-6'),
]


@pytest.mark.parametrize("override, expected", BAD_VALUES)
def test_a_bad_value_is_one_line(override: str, expected: str) -> None:
    assert lines_of(minimal(), override) == [expected]


BAD_OVERRIDES = [
    ("optimizr.lr=1", "--set optimizr.lr: unknown key; did you mean optimizer?"),
    ("optimizer.rl=1", "--set optimizer.rl: unknown key; did you mean optimizer.lr?"),
    ("rollout.lr=1", "--set rollout.lr: unknown key; did you mean optimizer.lr?"),
    ("run.steps.more=1", "--set run.steps.more: run.steps holds no keys; cut the path there"),
    ("agents.AA.dtype=float32", "--set agents.AA.dtype: no agent AA; did you mean A?"),
    ("agents.B=null", "--set agents.B: no agent B; the agents are A"),
    ("run.steps", "--set: run.steps: not of the form key.path=value; write e.g. optimizer.lr=1e-6"),
    ("run..steps=1", "--set: run..steps=1: not of the form key.path=value; write e.g. optimizer.lr=1e-6"),
    ("run.steps=[", "--set run.steps: [: not a YAML value; put it in quotes"),
]


@pytest.mark.parametrize("override, expected", BAD_OVERRIDES)
def test_a_bad_override_is_one_line(override: str, expected: str) -> None:
    assert lines_of(minimal(), override) == [expected]


def test_an_unknown_key_suggests_the_nearest() -> None:
    raw = minimal(optimiser={"lr": 1e-6}, algorithm={"delta_steps": 0.1})
    raw["agents"]["A"]["modell"] = 1
    assert lines_of(raw) == [
        "agents.A.modell: 1: unknown key; did you mean agents.A.model?",
        "algorithm.delta_steps: 0.1: unknown key; did you mean algorithm.delta_step?",
        'optimiser: {"lr": 1e-06}: unknown key; did you mean optimizer?',
    ]


def test_all_mistakes_are_told_at_once_and_each_once() -> None:
    raw = minimal(optimizer={"lr": "x", "momentum": 1})
    raw["agents"]["B"] = {"model": "elsewhere"}
    del raw["data"]
    assert [line.split(":")[0] for line in lines_of(raw)] == ["data", "optimizer.lr", "optimizer.momentum"]


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            b"run: {name: a}\nrun: {name: b}\n",
            ":2:1: the key 'run' stands here for the second time; correct the YAML",
        ),
        (
            b"run: {steps: 1, steps: 2}\n",
            ":1:17: the key 'steps' stands here for the second time; correct the YAML",
        ),
        (b"run: [1\n", ": expected ',' or ']', but got '<stream end>'; correct the YAML"),
        (b"run: !!python/object:os.system 1\n", "could not determine a constructor"),
        (b"run: \xff\n", ": not UTF-8 at byte 5; save it as UTF-8 text"),
        (b"a: \x00\n", "unacceptable character #x0000"),
        (b"", "config: holds no keys; write sections such as run, agents and data"),
        (b"- 1\n", "config: holds no keys; write sections such as run, agents and data"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert len(caught.value.lines) == 1
    assert expected in caught.value.lines[0]


def test_a_missing_file_and_a_folder_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; give the path of a YAML file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder; give the YAML file in it"):
        load(tmp_path)


def test_keys_are_text() -> None:
    assert lines_of(minimal(agents={1: {"model": "m"}})) == ["agents[1]: 1: not text; put it in quotes"]
    assert lines_of({**minimal(), 2: 3}) == ["[2]: 2: the key is not text; put it in quotes"]


def test_config_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from megatron_hacpo.config import check, load\n"
        f"check(load({str(PAIR)!r}))\n"
        "heavy = {'torch', 'transformers', 'megatron.core'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    root = PAIR.parent.parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


def test_shown_numbers_of_a_run(tmp_path: Path) -> None:
    config = resolve(minimal(run={"name": "n", "dir": str(tmp_path), "steps": 1}))
    assert isinstance(config, RunConfig)
    assert config.path == tmp_path / "n"
    assert config.agents["A"].parallel.world_size == 1


def test_configuration_page_is_up_to_date() -> None:
    """docs/configuration.md is written by tools/write_config_reference.py."""
    command = [sys.executable, str(ROOT / "tools/write_config_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_papers_evaluation_is_complete_in_its_section() -> None:
    """So it can be copied: no anchor of another section is used in it."""
    file = ROOT / "examples/paper/evaluation.yaml"
    text = file.read_text()
    section = yaml12.parse(text[text.index("evaluation:\n") :])
    benchmarks = load(file).evaluation.benchmarks
    assert list(section["evaluation"]["benchmarks"]) == list(benchmarks)
    assert len(benchmarks) == 7
    assert {benchmark.template.count(r"\boxed{}") for benchmark in benchmarks.values()} == {1}
    assert (benchmarks["aime25"].samples, benchmarks["aime25"].temperature) == (30, 1.0)
    assert {b.temperature for name, b in benchmarks.items() if name != "aime25"} == {0.0}
