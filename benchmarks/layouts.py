"""Every parallel layout against one rank: the table of docs/parallelism.md.

    python benchmarks/layouts.py

Runs three HACPO steps in every layout of tests/parity_worker.py with every model that fits it, in four
processes over gloo, float32, from one set of weights and one pool of responses, and the same on one rank. Per
layout and model: the largest difference over all updates, and max |s - 1| over each step's first own update
in float32 and bfloat16. Another table: one rank with other numbers of micro-batches.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from parity import Differences, differences, first_ratio_deviation, run_on_four
from parity_models import TOKENIZER_OF, write_models
from parity_worker import cases, steps_of

from megatron_hacpo.megatron import runtime

BUDGETS = (100_000, 240, 100, 48)
"""Tokens of a micro-batch: from one micro-batch per mini-batch to many."""


def cells(difference: Differences) -> str:
    return f"{difference.loss:.1e} | {difference.norm:.1e} | {difference.weight:.1e}"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        results = run_on_four(folder, "all")
        with runtime.alone(torch.device("cpu")) as world:
            one_rank = {model: steps_of(folder, model, world) for model in TOKENIZER_OF}
            split = {
                (model, tokens): steps_of(folder, model, world, tokens=tokens)
                for model in TOKENIZER_OF
                for tokens in BUDGETS
            }
    print("| layout | model | loss | gradient norm | weights | s - 1, fp32 | s - 1, bf16 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layout, model in cases(every_model=True):
        got = results[layout, model]
        half = first_ratio_deviation(results[layout, model, "bf16"])
        figures = cells(differences(got, one_rank[model]))
        print(f"| {layout} | {model} | {figures} | {first_ratio_deviation(got):g} | {half:g} |")
    print("\n| micro-batches | model | loss | gradient norm | weights |")
    print("| --- | --- | --- | --- | --- |")
    for (model, _), got in split.items():
        figures = cells(differences(got, one_rank[model]))
        print(f"| {got['micro_batches']} | {model} | {figures} |")


if __name__ == "__main__":
    main()
