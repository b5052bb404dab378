"""One SGLang server over HTTP: every request that the trainer sends, and what may come back."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from megatron_hacpo.rollout.sglang.versions import unsupported

REUSED_SECONDS = 1.0
"""How long an idle connection is used again. SGLang closes one after five seconds, and a request that is on
its way then looks as if the server had died."""

CONTROL_SECONDS = 300.0
"""For requests that a healthy server answers at once or after a weight bucket."""


class ServerError(RuntimeError):
    """A server refused a request, or answered what no healthy server answers. The message names both."""


class ServerGone(ServerError):  # noqa: N818 - reads as what happened
    """No answer: the server is dead, hangs, or cannot be reached."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself. tensor: its tensor-parallel size, in processes that hold weights.
    cache_tokens: how many tokens its cache holds."""

    version: str
    model_path: str
    dtype: str
    tensor: int
    context_length: int
    cache_tokens: int


class ServerClient:
    """Requests to one server. All of its coroutines run in one event loop, where `close` ends them."""

    def __init__(self, url: str, key: str | None) -> None:
        """url: http://HOST:PORT. key: the server's API key. Proxies of the environment are not used."""
        self.url = url
        self.key = key
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Any, *, seconds: float | None = CONTROL_SECONDS) -> Any:
        """The JSON answer to a POST; None if it is empty. Raises as `_request` does."""
        return await self._request("POST", path, body, seconds)

    async def get(self, path: str, *, seconds: float | None = CONTROL_SECONDS) -> Any:
        return await self._request("GET", path, None, seconds)

    async def unhealthy(self, seconds: float) -> str | None:
        """Why the server does not generate a token within `seconds`; None if it does."""
        try:
            await self.get("/health_generate", seconds=seconds)
        except ServerError as error:
            return str(error)
        return None

    async def answers(self, seconds: float) -> bool:
        """Whether the server's processes live, also while it is paused and generates nothing."""
        try:
            await self.get("/server_info", seconds=seconds)
        except ServerError:
            return False
        return True

    async def info(self) -> ServerInfo:
        """Raises ServerError for a version that does not speak the weight protocol used here."""
        said = await self.get("/server_info")
        version = str(said.get("version"))
        wrong = unsupported(version)
        if wrong is not None:
            raise ServerError(f"{self.url} {wrong}")
        # A server without a limit of its own tells how long a prompt may be, six tokens less.
        context = said.get("context_length") or said["max_req_input_len"] + 6
        cache = said["max_total_num_tokens"]
        return ServerInfo(version, said["model_path"], said["dtype"], said["tp_size"], context, cache)

    async def weight_version(self) -> str:
        """Of the weights that the server generates with."""
        return str((await self.get("/model_info"))["weight_version"])

    async def checksums(self) -> list[dict[str, str]]:
        """Per tensor-parallel rank: hash of each parameter as SGLang holds it, by SGLang's name."""
        said = await self.post("/weights_checker", {"action": "checksum"})
        return [rank["checksums"] for rank in said["ranks"]]

    async def generate(self, rid: str, input_ids: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """One response with its log-probs. No deadline of its own: health checks find a server that hangs."""
        body = {"rid": rid, "input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        return dict(await self.post("/generate", body, seconds=None))

    async def close(self) -> None:
        session, self._session = self._session, None  # first: closing takes a while
        if session is not None:
            await session.close()

    async def _request(self, method: str, path: str, body: Any, seconds: float | None) -> Any:
        """Raises ServerGone without an answer, ServerError for one that is not 200 or is no JSON."""
        if self._session is None:
            headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSED_SECONDS)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector, trust_env=False)
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as answer:
                text = await answer.text()
        except TimeoutError:
            raise ServerGone(f"{self.url}{path}: no answer in {seconds:g} s") from None
        except aiohttp.ClientError as error:
            raise ServerGone(f"{self.url}{path}: {error or type(error).__name__}") from None
        if answer.status == 401:
            raise ServerError(f"{self.url}{path}: wrong API key; give the server's own")
        if answer.status != 200:
            raise ServerError(f"{self.url}{path}: {answer.status}: {_reason(text)}")
        if not text.startswith(("{", "[", "null")):
            return None
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError(f"{self.url}{path}: the answer is cut off or broken ({error})") from None


def _reason(text: str) -> str:
    """What an error answer says, which has several forms, on one line."""
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return " ".join(str(said).split())[:500]
