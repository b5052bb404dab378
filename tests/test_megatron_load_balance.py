"""The loss that balances experts against its formula, and the entropy against all logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_steps import make_policy, pair_config
from megatron.core.transformer.moe.router import TopKRouter
from parity_models import write_models
from test_megatron_policy import random_sequences
from transformers import AutoModelForCausalLM

from megatron_hacpo.megatron.packing import PackedMicroBatch, TokenSequence
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World

COEF = 0.1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_models(folder)
    return folder


def experts(models: Path, world: World, *settings: str, tokens: int = 100) -> Policy:
    config = pair_config(f"agents.A.model={models / 'experts'}", *settings)
    return make_policy(config, "A", world, microbatch_tokens=tokens)


def balance_loss(logits: torch.Tensor, chosen: int) -> torch.Tensor:
    """Switch Transformer (2021), eq. 4-6, for `chosen` experts per token. logits: [t, experts]."""
    probabilities = logits.softmax(-1)
    counts = torch.bincount(logits.topk(chosen).indices.flatten(), minlength=logits.shape[1])
    return logits.shape[1] * ((counts / counts.sum()) * probabilities.mean(0)).sum()


def test_last_router_gets_the_formulas_gradient(
    models: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an update's balance loss, each micro-batch weighed with its tokens; other losses are 0 here."""
    policy = experts(models, world, f"agents.A.router_aux_loss_coef={COEF}")
    router = policy.modules[0].decoder.layers[-1].mlp.router
    inputs = []
    real = TopKRouter.gating

    def watched(self: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        if self is router:
            inputs.append(hidden.detach()[:, 0].clone())
        return real(self, hidden)

    monkeypatch.setattr(TopKRouter, "gating", watched)
    weight = router.weight.detach().clone().requires_grad_()
    sequences = random_sequences(12, vocabulary=15)
    gradients = []

    def loss(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 0.0 * log_probs.sum(), None

    real_gradient = policy._optimizer.prepare_grads
    monkeypatch.setattr(
        policy._optimizer,
        "prepare_grads",
        lambda: (gradients.append(router.weight.main_grad.clone()), real_gradient())[1],
    )
    result = policy.update(sequences, policy.plan(sequences), loss)
    assert len(inputs) > 2
    total = sum(len(hidden) for hidden in inputs)
    per_batch = [balance_loss(hidden @ weight.t(), router.topk) for hidden in inputs]
    expected = sum(len(hidden) / total * value for hidden, value in zip(inputs, per_batch, strict=True))
    (COEF * expected).backward()
    torch.testing.assert_close(gradients[0], weight.grad, atol=1e-7, rtol=1e-5)
    assert float(weight.grad.abs().max()) > 1e-5
    assert result.load_balance is not None
    assert result.load_balance > 1.0


def test_updates_on_the_balance_loss_alone_balance(models: Path, world: World) -> None:
    settings = [f"agents.A.router_aux_loss_coef={COEF}", "optimizer.lr=0.01"]
    policy = experts(models, world, *settings, tokens=1000)
    policy.advance_learning_rate()
    sequences = random_sequences(12, vocabulary=15)
    plan = policy.plan(sequences)

    def loss(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 0.0 * log_probs.sum(), None

    values = [policy.update(sequences, plan, loss).load_balance for _ in range(20)]
    assert values[-1] - 1.0 < 0.5 * (values[0] - 1.0)


def test_without_a_coefficient_there_is_no_such_loss(models: Path, world: World) -> None:
    policy = experts(models, world)
    sequences = random_sequences(4, vocabulary=15)
    result = policy.update(
        sequences, policy.plan(sequences), lambda micro, log_probs: (0.0 * log_probs.sum(), None)
    )
    assert result.load_balance is None
    assert result.grad_norm == 0.0


def test_entropy_is_that_of_transformers(world: World) -> None:
    config = pair_config()
    policy = make_policy(config, "B", world)
    model = AutoModelForCausalLM.from_pretrained(config.agents["B"].model)
    sequences = random_sequences(6, vocabulary=19)
    plan = policy.plan(sequences)
    got = policy.log_probs(sequences, plan, with_entropy=True)
    assert got.entropy == pytest.approx(sum(_entropy(model, s) for s in sequences), rel=1e-5)
    plain = policy.log_probs(sequences, plan)
    assert plain.entropy is None
    assert torch.equal(plain.sums, got.sums)


def _entropy(model: torch.nn.Module, sequence: TokenSequence) -> float:
    ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids])).long()[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1].double()
    return float(torch.distributions.Categorical(logits=logits).entropy().sum())
