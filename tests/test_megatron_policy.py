"""The Megatron policy against transformers, and against itself under other micro-batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_steps import make_policy, own_rollouts, pair_config, run_steps
from random_models import CONFIGS, SIZES, random_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import OptimizerConfig
from megatron_hacpo.hf.families import family_of
from megatron_hacpo.hf.read import HFWeights
from megatron_hacpo.hf.write import write_hf_folder
from megatron_hacpo.learner.batch import OwnBlock
from megatron_hacpo.megatron.batching import MicroBatchPlan
from megatron_hacpo.megatron.packing import TokenSequence
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World


def policy_of(folder: Path, world: World, dtype: torch.dtype = torch.float32, tokens: int = 4096) -> Policy:
    return Policy(
        folder,
        world=world,
        dtype=dtype,
        optimizer=OptimizerConfig(lr=1e-3),
        steps=10,
        temperature=0.7,
        microbatch_tokens=tokens,
        keep_reference=True,
    )


def random_sequences(count: int = 12, vocabulary: int = 37) -> list[TokenSequence]:
    rng = np.random.default_rng(3)

    def ids(low: int, high: int) -> np.ndarray:
        return rng.integers(1, vocabulary, rng.integers(low, high)).astype(np.int32)

    return [TokenSequence(ids(1, 30), ids(1, 40)) for _ in range(count)]


def transformers_log_probs(
    model: torch.nn.Module, sequences: list[TokenSequence], temperature: float
) -> torch.Tensor:
    sums = []
    for s in sequences:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()[None]
        with torch.no_grad():
            logits = model(ids).logits[0].float() / temperature
        log_probs = logits.log_softmax(-1)[len(s.prompt_ids) - 1 : -1]
        sums.append(log_probs.gather(1, ids[0, len(s.prompt_ids) :, None]).sum())
    return torch.stack(sums)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_transformers_and_weights_come_back(name: str, world: World, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name], tmp_path)
    policy = policy_of(tmp_path, world, tokens=100)
    sequences = random_sequences()
    plan = policy.plan(sequences)
    assert len(plan[0]) > 1
    got = policy.log_probs(sequences, plan).sums
    torch.testing.assert_close(got, transformers_log_probs(model, sequences, 0.7), atol=2e-4, rtol=2e-6)
    weights = HFWeights(tmp_path)
    saved = {key: weights.slice(key)[:] for key in weights.stored}
    exported = dict(policy.export())
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[key], saved[key]) for key in saved)


def test_exported_folder_gives_the_trained_models_logits(world: World, tmp_path: Path) -> None:
    config = pair_config()
    for name in "AB":
        policy = make_policy(config, name, world)
        run_steps(config, name, policy, steps=1)
        out = tmp_path / name
        write_hf_folder(Path(config.agents[name].model), policy.export(), out)
        trained = AutoModelForCausalLM.from_pretrained(out)
        untrained = AutoModelForCausalLM.from_pretrained(config.agents[name].model)
        sequences = random_sequences(8, vocabulary=19)
        got = policy.log_probs(sequences, policy.plan(sequences)).sums
        torch.testing.assert_close(got, transformers_log_probs(trained, sequences, 1.0), atol=1e-4, rtol=0)
        assert (got - transformers_log_probs(untrained, sequences, 1.0)).abs().max() > 1e-3
        assert (
            AgentTokenizer.load(out).fingerprint == AgentTokenizer.load(config.agents[name].model).fingerprint
        )


def first_update_deviation(block: OwnBlock, policy: Policy, plan: MicroBatchPlan) -> float:
    """max |s - 1| of an update with the weights of the old log-probs, in the micro-batches of `plan`."""
    new = policy.log_probs(block.sequences, plan)
    return float((torch.exp((new.sums - block.log_probs.sums) / block.counts) - 1.0).abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["A", "B"])
def test_own_ratio_is_exactly_one_at_the_first_update(name: str, dtype: str, world: World) -> None:
    config = pair_config(f"agents.{name}.dtype={dtype}")
    policy = make_policy(config, name, world)
    record = run_steps(config, name, policy, steps=1)[0]
    assert record.computed
    assert record.ratios is not None
    assert len(record.ratios) == 16
    assert float((record.ratios - 1.0).abs().max()) == 0.0


def test_another_plan_in_bf16_moves_own_ratios_beyond_the_clip(world: World) -> None:
    """Why old log-probs and update share one plan: another batch shape alone would clip own responses.

    Shown on B; A's matrices are so small that its kernels add in one order for every batch shape.
    """
    config = pair_config("agents.B.dtype=bfloat16")
    policy = make_policy(config, "B", world)
    tokenizer = AgentTokenizer.load(config.agents["B"].model)
    block = own_rollouts(config, policy, tokenizer, step=1).blocks[0]
    one_by_one = [[[row] for row in range(len(block.sequences))]]
    assert first_update_deviation(block, policy, block.plan) == 0.0
    assert first_update_deviation(block, policy, one_by_one) > 3e-4


@pytest.mark.parametrize("name", ["A", "B"])
def test_updates_do_not_depend_on_the_micro_batch_split(name: str, world: World) -> None:
    config = pair_config("algorithm.kl_coef=0.01")
    results = []
    for tokens in (100_000, 250, 60, 30):
        policy = make_policy(config, name, world, microbatch_tokens=tokens)
        records = run_steps(config, name, policy, steps=2)
        assert len(records) == 8
        results.append(([r.grad_norm for r in records], [r.tallies["loss/objective"][0] for r in records]))
    for norms, objectives in results[1:]:
        assert norms == pytest.approx(results[0][0], rel=1e-5)
        assert objectives == pytest.approx(results[0][1], abs=1e-6)


def test_update_with_a_loss_that_is_not_finite_changes_nothing(world: World) -> None:
    config = pair_config()
    policy = make_policy(config, "A", world)
    sequences = random_sequences(4, vocabulary=19)
    plan = policy.plan(sequences)
    policy.advance_learning_rate()
    before = [p.clone() for p in policy.parameters()]
    for bad in (float("nan"), float("inf")):
        result = policy.update(
            sequences, plan, lambda micro, log_probs, bad=bad: (log_probs.sum() * bad, None)
        )
        assert not result.applied
    # A loss that is infinite by a constant has finite gradients and is skipped all the same.
    result = policy.update(sequences, plan, lambda micro, log_probs: (log_probs.sum() + float("inf"), None))
    assert not result.applied
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert policy.update(sequences, plan, lambda micro, log_probs: (log_probs.sum(), None)).applied
    assert not all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_reference_log_probs_stay_those_of_the_start(world: World) -> None:
    config = pair_config("algorithm.kl_coef=0.01")
    policy = make_policy(config, "A", world)
    sequences = random_sequences(4, vocabulary=19)
    plan = policy.plan(sequences)
    start = policy.log_probs(sequences, plan).sums
    run_steps(config, "A", policy, steps=1)
    moved = policy.log_probs(sequences, plan).sums
    with policy.reference_weights():
        assert torch.equal(policy.log_probs(sequences, plan).sums, start)
    assert not torch.equal(moved, start)
    assert torch.equal(policy.log_probs(sequences, plan).sums, moved)


def test_kl_penalty_is_zero_at_the_start_and_grows(world: World) -> None:
    config = pair_config("algorithm.kl_coef=0.01")
    records = run_steps(config, "A", make_policy(config, "A", world), steps=2)
    kl = [r.tallies["loss/kl"][0] for r in records if "ratio/own/mean" in r.tallies]
    assert kl[0] == 0.0
    assert kl[-1] > 0.0


def test_learning_rate_warms_up_by_rl_steps(world: World) -> None:
    config = pair_config("optimizer.lr=1.0e-3", "optimizer.warmup_steps=4")
    policy = make_policy(config, "A", world)
    rates = []
    for _ in range(6):
        policy.advance_learning_rate()
        rates.append(policy.learning_rate)
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(sliding_window=128), "sliding_window: 128"),
        (LlamaConfig(attention_bias=True), "attention_bias: True"),
        (LlamaConfig(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (PretrainedConfig(), "model_type: ''"),
    ],
)
def test_unsupported_parts_are_refused_by_name(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family_of(config)


def test_missing_and_misshapen_tensors_are_named(world: World, tmp_path: Path) -> None:
    random_model(CONFIGS["llama"], tmp_path)
    wider = LlamaConfig(**{**SIZES, "intermediate_size": 80})
    wider.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gate_proj.weight is \[96, 48\] .* \[80, 48\] by config"):
        policy_of(tmp_path, world)
    deeper = LlamaConfig(**{**SIZES, "num_hidden_layers": 5})
    deeper.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.layers\.4\..* is absent"):
        policy_of(tmp_path, world)
