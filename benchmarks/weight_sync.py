"""How long weights take into a real SGLang server, against a bare gloo broadcast of the same bytes.

    python benchmarks/weight_sync.py --sglang-python .venv-sglang/bin/python [--repeats 5]

A random Llama of 0.11 billion parameters in float32 (`make sglang-cpu` installs the server). Turn by turn in
one run: a broadcast of one tensor of as many bytes to another process, and a whole sync over each transport,
from pausing the server to its answer which version it has. Prints medians and their ratio to the broadcast's.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from random_llama import make_policy, write_folder

from megatron_hacpo.hf.families import tensor_shapes
from megatron_hacpo.megatron import runtime
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.server import ManagedServer, ServerSpec
from megatron_hacpo.rollout.sglang.sync import ExpectedWeights, WeightSync
from megatron_hacpo.rollout.sglang.transports import DiskTransport, DistributedTransport, TensorTransport

KEY = "benchmark"
TIMEOUT = timedelta(minutes=5)


def receive(port: int, size: int) -> None:
    """The other end of the bare broadcasts: until the first byte is 0."""
    group = gloo(dist.TCPStore("127.0.0.1", port, is_master=False), 1)
    buffer = torch.empty(size, dtype=torch.uint8)
    while True:
        group.broadcast(buffer, 0).wait()
        if int(buffer[0]) == 0:
            return


def gloo(store: dist.Store, rank: int) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, TIMEOUT)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sglang-python", default=".venv-sglang/bin/python")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--receive", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if options.receive:
        return receive(*options.receive)
    with tempfile.TemporaryDirectory() as folder, runtime.alone(torch.device("cpu")) as world:
        return measure(Path(folder), world, options)


def measure(folder: Path, world: runtime.World, options: argparse.Namespace) -> None:
    model = folder / "model"
    write_folder(model)
    policy = make_policy(model, world)
    size = sum(weight.nbytes for weight in policy.parameters())
    loop = LoopThread()
    python = str(Path(options.sglang_python).absolute())
    spec = ServerSpec(
        python=python,
        model=model,
        dtype="float32",
        tensor=1,
        host="127.0.0.1",
        context=256,
        max_concurrent=8,
        cache_tokens=1024,
        memory_fraction=None,
        first_gpu=None,
        seed=1,
        key=KEY,
    )
    server = ManagedServer(spec, folder / "server.log")
    try:
        loop.run(server.ready(600.0))
        expected = ExpectedWeights(tensor_shapes(policy.hf_config), torch.float32)
        transports = {
            "distributed": lambda loop: DistributedTransport(loop, "bench", world.device, TIMEOUT),
            "tensor": TensorTransport,
            "disk": lambda loop: DiskTransport(loop, folder / "weights", 0, 600.0),
        }
        syncs = {
            name: WeightSync(world, policy.stage_tensors, expected, transport, bucket_bytes=128 * 2**20)
            for name, transport in transports.items()
        }
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, __file__, "--receive", str(store.port), str(size)]
        receiver = subprocess.Popen(command)
        bare = gloo(store, 0)
        flat = torch.ones(size, dtype=torch.uint8)
        times: dict[str, list[float]] = {name: [] for name in ("broadcast", *syncs)}
        for turn in range(options.repeats + 1):  # the first one makes groups and does not count
            times["broadcast"].append(seconds(lambda: bare.broadcast(flat, 0).wait()))
            for name, sync in syncs.items():
                target = (0, 0, 1, server.client.url, KEY)
                times[name].append(seconds(lambda s=sync, t=target, v=turn: s.update([t], v + 1)))
        flat[0] = 0
        bare.broadcast(flat, 0).wait()
        receiver.wait()
        for sync in syncs.values():
            sync.close()
    finally:
        loop.run(server.client.close())
        server.kill()
    reference = statistics.median(times["broadcast"][1:])
    print(f"{size / 1e6:.0f} MB, median of {options.repeats}")
    for name, values in times.items():
        median = statistics.median(values[1:])
        spread = f"{min(values[1:]):.2f} to {max(values[1:]):.2f}"
        print(f"{name:12} {median:6.2f} s  {median / reference:5.2f} x ({spread})")


if __name__ == "__main__":
    main()
