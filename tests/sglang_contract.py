"""Every request of the client against SGLang's real HTTP application, run by SGLang's own Python.

The application is the server's, its scheduler is not there: what reaches it is kept. SGLang ignores unknown
keys, so what it made of a request is looked at, not only that it took it.
"""

import asyncio
import json
import runpy
from collections.abc import Coroutine
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
runpy.run_path(str(ROOT / "megatron_hacpo/rollout/sglang/cpu_server.py"))

from sglang.srt.entrypoints import http_server  # noqa: E402
from sglang.srt.managers import io_struct as io  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

from megatron_hacpo.rollout.base import Sampling  # noqa: E402
from megatron_hacpo.rollout.sglang import transports  # noqa: E402
from megatron_hacpo.rollout.sglang.client import ServerClient, ServerError  # noqa: E402
from megatron_hacpo.rollout.sglang.generation import sampling_params  # noqa: E402
from megatron_hacpo.rollout.sglang.transports import (  # noqa: E402
    DiskTransport,
    DistributedTransport,
    Target,
    TensorTransport,
)

VOCABULARY = 19


class Scheduler:
    """Keeps what the application hands on."""

    server_status = None
    gracefully_exit = False

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def generate_request(self, request: Any, _: Any) -> Any:
        request.normalize_batch_and_arguments()
        parameters = SamplingParams(**request.sampling_params)
        parameters.verify(VOCABULARY)
        self.seen.append((request, parameters))
        yield {"output_ids": [1], "meta_info": {"id": request.rid}}

    async def update_weights_from_disk(self, request: Any, _: Any = None) -> Any:
        self.seen.append(request)
        return True, "", 0

    def __getattr__(self, name: str) -> Any:
        async def control(request: Any, _: Any = None) -> Any:
            self.seen.append(request)
            return True, ""

        return control

    def take(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen


class InProcess(ServerClient):
    """The client, with the application in place of the network."""

    async def _request(self, method: str, path: str, body: Any, seconds: float | None) -> Any:
        answer = await asyncio.to_thread(app.request, method, path, json=body)
        if answer.status_code != 200:
            raise ServerError(f"{path}: {answer.status_code}: {answer.text}")
        return json.loads(answer.text) if answer.text.startswith("{") else None


class Here:
    """The part of LoopThread that transports use."""

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(asyncio.run(coroutine))
        return future

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)


class Group:
    """A process group whose other ranks have joined, and have taken everything already."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        assert (tensor.is_contiguous(), root) == (True, 0)
        return SimpleNamespace(wait=lambda: None)


transports._make_group = lambda *_: Group()
scheduler = Scheduler()
http_server.set_global_state(
    http_server._GlobalState(tokenizer_manager=scheduler, template_manager=None, scheduler_info={})
)
app = TestClient(http_server.app)
client = InProcess("http://127.0.0.1:1", None)
target = Target(0, 0, 2, client)
here = Here()
bucket = [("a.weight", torch.ones(3, 2).T), ("b", torch.ones(4, dtype=torch.bfloat16))]


def check_generation() -> None:
    sampling = Sampling(responses_per_prompt=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=4)
    for asked, top_k in ((sampling, 4), (Sampling(responses_per_prompt=1, max_tokens=7), 1 << 30)):
        request = sampling_params(asked, (1, 2))
        answer = asyncio.run(client.generate("0000-1", [5, 6], request))
        assert answer["meta_info"]["id"] == "0000-1"
        ((seen, parameters),) = scheduler.take()
        assert (seen.rid, seen.input_ids, seen.return_logprob, seen.is_single) == (
            "0000-1",
            [5, 6],
            True,
            True,
        )
        assert parameters.max_new_tokens == 7
        assert (parameters.temperature, parameters.top_p) == (asked.temperature, asked.top_p)
        assert parameters.top_k == top_k
        assert set(parameters.stop_token_ids) == {1, 2}


def check_broadcast() -> None:
    transport = DistributedTransport(here, "agent", torch.device("cpu"), timedelta(seconds=10))
    asyncio.run(transport.prepare(target))
    pause, begin = scheduler.take()
    assert isinstance(pause, io.PauseGenerationReqInput)
    assert pause.mode == "retract"
    assert isinstance(begin, io.BeginWeightUpdateReqInput)

    transport.send([target], bucket)
    join, update = scheduler.take()
    assert isinstance(join, io.InitWeightsUpdateGroupReqInput)
    assert (join.rank_offset, join.world_size, join.group_name, join.backend) == (1, 3, "agent-1", "gloo")
    assert join.master_port > 0
    assert join.master_address
    assert isinstance(update, io.UpdateWeightsFromDistributedReqInput)
    assert (update.names, update.dtypes) == (["a.weight", "b"], ["float32", "bfloat16"])
    assert [list(shape) for shape in update.shapes] == [[2, 3], [4]]
    assert (update.group_name, update.load_format, update.flush_cache) == ("agent-1", None, True)

    asyncio.run(transport.finish(target, "12"))
    end, version, go_on = scheduler.take()
    assert isinstance(end, io.EndWeightUpdateReqInput)
    assert (version.new_version, version.abort_all_requests) == ("12", False)
    assert isinstance(go_on, io.ContinueGenerationReqInput)


def check_tensors() -> None:
    TensorTransport(here).send([target], bucket)
    (update,) = scheduler.take()
    assert isinstance(update, io.UpdateWeightsFromTensorReqInput)
    assert len(update.serialized_named_tensors) == 2
    assert (update.load_format, update.flush_cache) == (None, True)


def check_disk() -> None:
    transport = DiskTransport(here, Path("/shared/A"), 0, 60.0)
    asyncio.run(transport.prepare(target))
    (pause,) = scheduler.take()
    assert pause.mode == "retract"
    asyncio.run(transport.finish(target, "3"))
    update, _ = scheduler.take()
    assert isinstance(update, io.UpdateWeightFromDiskReqInput)
    assert (update.model_path, update.weight_version) == ("/shared/A/version-3", "3")


def check_memory() -> None:
    for path, kind in (
        ("/release_memory_occupation", io.ReleaseMemoryOccupationReqInput),
        ("/resume_memory_occupation", io.ResumeMemoryOccupationReqInput),
    ):
        asyncio.run(client.post(path, {"tags": ["kv_cache"]}))
        (seen,) = scheduler.take()
        assert isinstance(seen, kind)
        assert seen.tags == ["kv_cache"]


for check in (check_generation, check_broadcast, check_tensors, check_disk, check_memory):
    check()
    print(f"{check.__name__} ok", flush=True)
