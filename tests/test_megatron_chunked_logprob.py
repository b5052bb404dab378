"""Log-probs in chunks against torch's log_softmax, Megatron's cross-entropy, and over two real ranks."""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.chunked_logprob import chunked_log_probs
from megatron_hacpo.megatron.runtime import World

TOKENS, HIDDEN = 11, 24
CHUNKS = [1, 3, TOKENS, TOKENS + 5]


class Case(NamedTuple):
    """vocab: tokens that exist. padded: rows of the whole weight. logits: about how large they get."""

    vocab: int = 37
    padded: int = 38
    tokens: int = TOKENS
    temperature: float = 0.7
    logits: float = 5.0
    padding: float = 1.0
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "vocabulary that two ranks share evenly": Case(vocab=38),
    "one rank holds padding alone": Case(vocab=5, padded=16),
    "huge padding": Case(vocab=33, padding=1e30),
    "extreme logits": Case(logits=1e4),
    "one token": Case(tokens=1),
    "bf16": Case(dtype=torch.bfloat16),
}


class Result(NamedTuple):
    log_probs: torch.Tensor
    entropy: torch.Tensor
    hidden_grad: torch.Tensor
    weight_grad: torch.Tensor


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [r, h], the whole weight [padded, h], targets [r], and the log-probs' gradient [r]."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(case.tokens, HIDDEN, generator=generator) * case.logits / HIDDEN**0.5
    weight = torch.randn(case.padded, HIDDEN, generator=generator)
    weight[case.vocab :] *= case.padding
    targets = torch.randint(case.vocab, (case.tokens,), generator=generator)
    targets[-1:] = case.vocab - 1
    return (
        hidden.to(case.dtype),
        weight.to(case.dtype),
        targets,
        torch.randn(case.tokens, generator=generator),
    )


def ours(case: Case, chunk: int) -> Result:
    """On this tensor-parallel rank, with Megatron's own sum of the hidden states' gradient."""
    hidden, weight, targets, grad = inputs(case)
    size = parallel_state.get_tensor_model_parallel_world_size()
    shard = weight.chunk(size)[parallel_state.get_tensor_model_parallel_rank()].clone().requires_grad_()
    hidden.requires_grad_()
    log_probs, entropy = chunked_log_probs(
        tensor_parallel.copy_to_tensor_model_parallel_region(hidden),
        shard,
        targets,
        temperature=case.temperature,
        vocab_size=case.vocab,
        chunk_tokens=chunk,
        with_entropy=True,
    )
    log_probs.backward(grad.to(log_probs.dtype))
    assert entropy is not None
    assert not entropy.requires_grad
    assert hidden.grad is not None
    assert shard.grad is not None
    return Result(log_probs.detach(), entropy, hidden.grad, shard.grad)


def expected(case: Case) -> Result:
    """By torch.log_softmax over the tokens that exist, in float64."""
    hidden, weight, targets, grad = inputs(case)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_softmax = (hidden @ weight[: case.vocab].t() / case.temperature).log_softmax(-1)
    log_probs = log_softmax.gather(1, targets[:, None])[:, 0]
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    log_probs.backward(grad.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    return Result(log_probs.detach(), entropy.detach(), hidden.grad, weight.grad)


def assert_close(result: Result, other: Result, tolerance: float) -> None:
    """Within `tolerance` of each tensor's largest element, or of 1 where that is larger."""
    for name, mine, theirs in zip(Result._fields, result, other, strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(
            mine.double(), theirs.double(), atol=tolerance * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def tolerance_of(case: Case) -> float:
    return 1e-2 if case.dtype is torch.bfloat16 else 1e-6


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_log_softmax(name: str, chunk: int, world: World) -> None:
    result = ours(CASES[name], chunk)
    assert all(bool(t.isfinite().all()) for t in result)
    assert bool((result.log_probs <= 0).all())
    assert_close(result, expected(CASES[name]), tolerance_of(CASES[name]))
    assert not result.weight_grad[CASES[name].vocab :].any()


@pytest.mark.parametrize("name", ["plain", "extreme logits", "bf16"])
def test_one_chunk_is_bitwise_megatrons_cross_entropy(name: str, world: World) -> None:
    case = CASES[name]
    hidden, weight, targets, _ = inputs(case)
    logits = torch.matmul(hidden, weight.t()).float() / case.temperature
    logits[:, case.vocab :] = torch.finfo(torch.float32).min
    losses = tensor_parallel.vocab_parallel_cross_entropy(logits[:, None], targets[:, None])
    assert torch.equal(ours(case, TOKENS).log_probs, -losses[:, 0])


def test_float64_gradients_by_finite_differences(world: World) -> None:
    hidden, weight, targets, _ = inputs(Case(vocab=6, padded=7, tokens=4, logits=1.0, dtype=torch.float64))
    hidden, weight = hidden[:, :3].clone().requires_grad_(), weight[:, :3].clone().requires_grad_()

    def log_probs(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chunked_log_probs(h, w, targets, temperature=0.7, vocab_size=6, chunk_tokens=3)[0]

    assert torch.autograd.gradcheck(log_probs, (hidden, weight))


def bitwise_repeats(case: Case, chunk: int) -> bool:
    """Log-probs of one call without gradient, of one with, and of one with entropy are the same bits."""
    hidden, weight, targets, _ = inputs(case)
    size = parallel_state.get_tensor_model_parallel_world_size()
    shard = weight.chunk(size)[parallel_state.get_tensor_model_parallel_rank()].clone()

    def log_probs(with_entropy: bool) -> torch.Tensor:
        return chunked_log_probs(
            hidden,
            shard,
            targets,
            temperature=case.temperature,
            vocab_size=case.vocab,
            chunk_tokens=chunk,
            with_entropy=with_entropy,
        )[0]

    with torch.no_grad():
        old = log_probs(False)
    hidden.requires_grad_()
    shard.requires_grad_()
    return all(torch.equal(old, log_probs(with_entropy)) for with_entropy in (False, True))


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_bitwise_the_same_with_and_without_gradient_and_entropy(name: str, chunk: int, world: World) -> None:
    assert bitwise_repeats(CASES[name], chunk)


def test_no_tokens_still_have_a_graph(world: World) -> None:
    result = ours(Case(tokens=0, padded=37), 3)
    assert result.log_probs.shape == result.entropy.shape == (0,)
    assert result.log_probs.dtype == torch.float32
    assert result.hidden_grad.shape == (0, HIDDEN)
    assert not result.weight_grad.any()


def test_nothing_larger_than_a_chunk_of_logits_or_the_weight(world: World) -> None:
    case = Case(vocab=400, padded=400, tokens=100)

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
            return output

    with Largest() as largest:
        ours(case, 30)
    assert largest.elements == max(30 * 400, 400 * HIDDEN)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two real processes computed (`main`)."""
    folder = tmp_path_factory.mktemp("chunked")
    run_ranks(Path(__file__).name, 2, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one(name: str, chunk: int, two_ranks: list[dict[Any, Any]], world: World) -> None:
    first, second = (Result(*rank[name, chunk]) for rank in two_ranks)
    for mine, theirs in zip(first[:3], second[:3], strict=True):
        assert torch.equal(mine, theirs)
    whole = Result(*first[:3], torch.cat([first.weight_grad, second.weight_grad]))
    assert bool((whole.log_probs <= 0).all())
    assert_close(whole, ours(CASES[name], chunk), tolerance_of(CASES[name]))
    assert_close(whole, expected(CASES[name]), tolerance_of(CASES[name]))


def test_two_ranks_repeat_bitwise_and_agree_on_the_number_of_collectives(
    two_ranks: list[dict[Any, Any]],
) -> None:
    for rank in two_ranks:
        assert rank["bitwise"]
        # Two in forward and Megatron's one sum of the hidden states' gradient; for no tokens only the latter.
        assert rank["collectives"] == {"plain": 3, "empty": 1}
        assert not Result(*rank["empty"]).weight_grad.any()


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    runtime.start(
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        layout=runtime.Layout(tensor=2),
        seed=1,
        timeout=timedelta(minutes=5),
    )
    results: dict[Any, Any] = {
        (name, chunk): tuple(ours(case, chunk)) for name, case in CASES.items() for chunk in CHUNKS
    }
    results["bitwise"] = all(bitwise_repeats(case, chunk) for case in CASES.values() for chunk in CHUNKS)

    all_reduce, calls = dist.all_reduce, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    results["collectives"] = {}
    for name, case in {"plain": Case(), "empty": Case(tokens=0)}.items():
        calls = 0
        results[name] = tuple(ours(case, 3))
        results["collectives"][name] = calls
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
