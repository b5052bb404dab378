"""What travels between agents: round trip, and every kind of broken bytes."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_hacpo.bridge.trajectory import (
    SCHEMA,
    Contribution,
    Trajectory,
    decode,
    encode,
    hash_prompts,
    load,
    pack_ids,
    save_atomically,
    unpack_ids,
)


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "prompt": 0,
        "text": "\\boxed{4} \U0001f642",
        "valid_text": True,
        "reward": 1.0,
        "finish_reason": "stop",
        "token_count": 3,
        "mean_log_prob": -0.1,
        "token_ids": pack_ids([5, 70000, 2]),
    }
    return Trajectory(**{**fields, **changes})


def contribution(**changes: Any) -> Contribution:
    fields: dict[str, Any] = {
        "generation": 0,
        "step": 7,
        "agent": "A",
        "tokenizer": "f00d",
        "prompts": hash_prompts(["p0", "p1"]),
        "trajectories": [trajectory(), trajectory(prompt=1, reward=None, token_ids=None)],
    }
    return Contribution(**{**fields, **changes})


def tampered(**changes: Any) -> bytes:
    """A contribution whose first trajectory has other values."""
    plain = msgspec.msgpack.decode(encode(contribution()))
    plain["trajectories"][0].update(changes)
    return msgspec.msgpack.encode(plain)


def test_round_trip_is_exact() -> None:
    mean = float(np.float64(-1.0) / 3)
    sent = contribution(trajectories=[trajectory(mean_log_prob=mean), trajectory(token_count=0, **EMPTY)])
    received = decode(encode(sent))
    assert received == sent
    assert received.trajectories[0].mean_log_prob == mean  # not rounded on the way
    assert decode(bytearray(encode(sent))) == sent


EMPTY: dict[str, Any] = {"text": "", "finish_reason": "length", "mean_log_prob": 0.0, "token_ids": b""}


def test_ids_travel_as_little_endian_int32() -> None:
    assert pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert pack_ids(np.array([1, 258], dtype=np.int64)) == pack_ids([1, 258])
    back = unpack_ids(pack_ids([1, 258]))
    assert back.dtype == np.int32
    assert back.tolist() == [1, 258]
    assert unpack_ids(b"").tolist() == []


def test_hash_of_prompts_depends_on_ids_and_order() -> None:
    hashes = {hash_prompts(ids) for ids in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""], [])}
    assert len(hashes) == 5


def test_truncated_bytes_and_foreign_bytes_are_named() -> None:
    data = encode(contribution())
    for cut in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match=f"contribution of {cut} bytes cannot be read"):
            decode(data[:cut])
    with pytest.raises(ValueError, match="cannot be read"):
        decode(data + b"\0")
    with pytest.raises(ValueError, match="cannot be read"):
        decode(b"PK\x03\x04 not msgpack")


def test_another_schema_is_named_before_anything_else() -> None:
    data = msgspec.msgpack.encode({"schema": SCHEMA + 1, "unknown": 1})
    with pytest.raises(ValueError, match=f"schema {SCHEMA + 1}, not {SCHEMA}"):
        decode(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_log_prob": float("nan")}, "mean_log_prob nan is not finite"),
        ({"mean_log_prob": float("-inf")}, "mean_log_prob -inf is not finite"),
        ({"reward": float("nan")}, "reward nan is not finite: send None"),
        ({"reward": "1"}, "reward"),
        ({"prompt": -1}, "prompt -1"),
        ({"token_count": -1}, "token_count -1"),
        ({"token_count": 2}, "12 bytes for token_count 2"),
        ({"token_count": 0, "token_ids": b""}, "a stop token counts"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"text": None}, "text"),
    ],
)
def test_wrong_values_are_named_with_their_place(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        decode(tampered(**changes))
    assert "trajectories[" in str(caught.value)


def test_wrong_values_cannot_be_made_either() -> None:
    with pytest.raises(ValueError, match="not finite"):
        trajectory(mean_log_prob=float("nan"))


def test_save_is_atomic_and_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "step_7" / "pool" / "A"
    save_atomically(path, b"old")
    save_atomically(path, encode(contribution()))
    assert [file.name for file in path.parent.iterdir()] == ["A"]
    assert load(path) == contribution()
    save_atomically(path, encode(contribution())[:-5])
    with pytest.raises(ValueError, match=r"pool/A: contribution of .* cannot be read"):
        load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_atomically(tmp_path / "A", b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_atomically(tmp_path / "A", b"new")
    assert (tmp_path / "A").read_bytes() == b"old"
