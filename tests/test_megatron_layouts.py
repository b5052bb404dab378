"""The same HACPO steps in every layout against one rank: tensor, sequence, pipeline, context, expert and data
parallelism, recomputation, and the distributed optimizer."""

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_steps import pair_config
from megatron.core.transformer.moe.router import TopKRouter
from parity import differences, first_ratio_deviation, run_on_four
from parity_models import TOKENIZER_OF, write_models
from parity_worker import balanced_update, cases, steps_of

from megatron_hacpo.algorithm.minibatch import window_lower_bound
from megatron_hacpo.megatron.runtime import World

CASES = cases(every_model=False)
MARGIN = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def many_ranks(models: Path) -> Any:
    return run_on_four(models)


@pytest.fixture(scope="module")
def router_margins() -> Iterator[list[float]]:
    """Smallest gap between the last chosen and the first unchosen expert, per routing."""
    margins: list[float] = []
    real = TopKRouter.gating

    def watched(router: TopKRouter, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(router, hidden)
        ordered = logits.detach().flatten(0, -2).sort(dim=-1, descending=True).values
        margins.append(float((ordered[:, router.topk - 1] - ordered[:, router.topk]).min()))
        return logits

    TopKRouter.gating = watched
    yield margins
    TopKRouter.gating = real


@pytest.fixture(scope="module")
def one_rank(models: Path, world: World, router_margins: list[float]) -> dict[str, Any]:
    """The reference; none of its discrete choices is so close that rounding could turn it."""
    results = {model: steps_of(models, model, world) for model in TOKENIZER_OF}
    assert min(router_margins) > MARGIN
    algorithm = pair_config().algorithm
    for result in results.values():
        for number, ratios in enumerate(result["ratios"]):
            update = number % 4
            lower = window_lower_bound(update, algorithm.delta, algorithm.delta_step)
            own_bounds = [1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high]
            bounds = own_bounds if update < 2 else [lower, 1.0]
            assert all(float((ratios - bound).abs().min()) > MARGIN for bound in bounds)
    return results


def check_updates(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, ratios, gradient norms and the weights after all steps."""
    assert len(expected["norms"]) == 12
    assert max(astuple(differences(got, expected))) <= 1e-5
    assert got["lonely"] == pytest.approx(expected["lonely"], rel=1e-5)
    assert got["cosine"] == pytest.approx(expected["cosine"], abs=1e-4)


def check_first_ratios(results: dict[str, Any]) -> None:
    """s of each step's first update is exactly 1."""
    assert first_ratio_deviation(results) == 0.0


@pytest.mark.parametrize("layout, model", CASES)
def test_layout_gives_one_ranks_updates(
    layout: str, model: str, many_ranks: Any, one_rank: dict[str, Any]
) -> None:
    check_updates(many_ranks[layout, model], one_rank[model])


@pytest.fixture(scope="module")
def balanced_on_one_rank(models: Path, world: World) -> tuple[float, float | None]:
    return balanced_update(models, world)


@pytest.mark.parametrize("layout", [layout for layout, model in CASES if model == "experts"])
def test_layout_balances_experts_as_one_rank(
    layout: str, many_ranks: Any, balanced_on_one_rank: tuple[float, float]
) -> None:
    assert balanced_on_one_rank[1] > 1.01  # there is something to balance
    assert many_ranks[layout, "balanced"] == pytest.approx(balanced_on_one_rank, rel=1e-5)


@pytest.mark.parametrize("precision", [(), ("bf16",)])
@pytest.mark.parametrize("layout, model", CASES)
def test_first_own_ratio_is_exactly_one_in_every_layout(
    layout: str, model: str, precision: tuple[str, ...], many_ranks: Any
) -> None:
    check_first_ratios(many_ranks[(layout, model, *precision)])


@pytest.mark.slow
def test_every_model_in_every_layout(
    models: Path, one_rank: dict[str, Any], balanced_on_one_rank: tuple[float, float]
) -> None:
    results = run_on_four(models, "all")
    for layout, model in cases(every_model=True):
        check_updates(results[layout, model], one_rank[model])
        check_first_ratios(results[layout, model])
        check_first_ratios(results[layout, model, "bf16"])
        if model == "experts":
            assert results[layout, "balanced"] == pytest.approx(balanced_on_one_rank, rel=1e-5)


@pytest.mark.parametrize("model", TOKENIZER_OF)
@pytest.mark.parametrize("tokens, count", [(100_000, 1), (240, 2), (100, 4), (48, 8)])
def test_updates_do_not_depend_on_the_number_of_micro_batches(
    tokens: int, count: int, model: str, models: Path, world: World, one_rank: dict[str, Any]
) -> None:
    got = steps_of(models, model, world, tokens=tokens)
    assert got["micro_batches"] == count
    check_updates(got, one_rank[model])
