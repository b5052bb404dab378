"""Peak memory and time of response log-probs, forward and backward: in chunks, and from full logits.

    python benchmarks/logprob_memory.py [--chunks 256 512 1024] [--tokens 4096] [--dtype float32]

Runs every path in a process of its own, on one CPU thread, and prints its peak resident memory above what
the imports take, as a multiple of what the chunked path cannot do without (inputs, their gradients, and the
logits of one chunk), and its CPU time as a multiple of the full path's. The full path is Megatron's: the
logits of all tokens, the rows that predict responses, and `vocab_parallel_cross_entropy`. In backward the
chunked path computes its logits again, a third more matrix products than the full path.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.chunked_logprob import chunked_log_probs


def full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = torch.matmul(hidden, weight.t())
    chosen = logits.index_select(0, torch.arange(len(targets))).float() / 1.0
    return -tensor_parallel.vocab_parallel_cross_entropy(chosen[:, None], targets[:, None])[:, 0]


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
    return chunked_log_probs(
        hidden, weight, targets, temperature=1.0, vocab_size=len(weight), chunk_tokens=chunk
    )[0]


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def inputs(options: argparse.Namespace, tokens: int, columns: int) -> list[torch.Tensor]:
    dtype = getattr(torch, options.dtype)
    hidden = torch.empty(tokens, options.hidden, dtype=dtype).normal_().requires_grad_()
    weight = torch.empty(columns, options.hidden, dtype=dtype).normal_(0.0, 0.05).requires_grad_()
    return [hidden, weight, torch.randint(columns, (tokens,))]


def measure(options: argparse.Namespace) -> None:
    """Run one path once and print its figures; leave results in `--results` for the comparison."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    runtime.start(
        store=dist.HashStore(), rank=0, layout=runtime.Layout(), seed=1, timeout=timedelta(minutes=30)
    )

    def log_probs(*tensors: torch.Tensor) -> torch.Tensor:
        return chunked(*tensors, options.measure) if options.measure else full(*tensors)

    log_probs(*inputs(options, 64, 512)).sum().backward()  # loads what the first call loads
    imports = resident("VmRSS")
    hidden, weight, targets = inputs(options, options.tokens, options.vocabulary)
    grad = torch.linspace(-1.0, 1.0, options.tokens)
    level = resident("VmRSS")
    start = time.process_time()
    result = log_probs(hidden, weight, targets)
    forward = time.process_time() - start
    result.backward(grad)
    seconds = time.process_time() - start
    peak = resident("VmHWM")
    torch.save([result.detach(), hidden.grad, weight.grad], options.results)
    print(json.dumps({"forward": forward, "seconds": seconds, "peak": peak - imports, "own": peak - level}))


def run(arguments: list[str], chunk: int, results: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--measure", str(chunk), "--results", str(results)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def difference(a: Path, b: Path) -> float:
    """The largest difference relative to a tensor's largest element, over log-probs and both gradients."""
    pairs = zip(torch.load(a), torch.load(b), strict=True)
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # a chunk, or 0 for the full path
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        return measure(options)

    item = getattr(torch, options.dtype).itemsize
    both = 2 * item * options.hidden * (options.tokens + options.vocabulary)
    print(
        f"{options.tokens} tokens, vocabulary {options.vocabulary}, hidden {options.hidden}, {options.dtype}"
    )
    print(f"inputs and their gradients: {both / 1e9:.2f} GB")
    with tempfile.TemporaryDirectory() as folder:
        reference = run(sys.argv[1:], 0, Path(folder) / "full.pt")
        print(f"full logits: peak {reference['peak'] / 1e9:.2f} GB, {reference['seconds']:.1f} s")
        for chunk in options.chunks:
            mine = run(sys.argv[1:], chunk, Path(folder) / "chunked.pt")
            one_chunk = 4 * chunk * options.vocabulary
            print(
                f"chunk {chunk}: peak {mine['peak'] / 1e9:.2f} GB = {mine['peak'] / (both + one_chunk):.2f} x"
                f" (inputs, gradients, one chunk of {one_chunk / 1e9:.2f} GB),"
                f" {mine['peak'] / reference['peak']:.2f} x the full path's;"
                f" {mine['seconds']:.1f} s = {mine['seconds'] / reference['seconds']:.2f} x (forward"
                f" {mine['forward'] / reference['forward']:.2f} x);"
                f" results differ by {difference(Path(folder) / 'chunked.pt', Path(folder) / 'full.pt'):.1e}"
            )
    return None


if __name__ == "__main__":
    main()
