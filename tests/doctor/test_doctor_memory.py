"""The estimate of memory per GPU, phase by phase, and what is said about it."""

import pytest
from doctor_inputs import FOUR_NODES, PARAMETERS, QWEN, ROOT, TWO_NODES, estimated, shape_of

from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.doctor import memory
from megatron_hacpo.doctor.finding import Finding
from megatron_hacpo.doctor.memory import GB, MemoryEstimate

pytestmark = pytest.mark.usefixtures("models")


def judged(config: RunConfig, agent: str = QWEN) -> list[Finding]:
    return list(memory.findings(config, agent, estimated(config, agent)))


def test_constants_of_other_modules_are_theirs() -> None:
    """They are not imported, since Megatron-core would be too."""
    source = ROOT / "megatron_hacpo"
    chunked = (source / "megatron" / "chunked_logprob.py").read_text()
    assert f"CHUNK_TOKENS = {memory.CHUNK_TOKENS}\n" in chunked
    local = (source / "rollout" / "local.py").read_text()
    assert f"max_batch_responses: int = {memory.LOCAL_BATCH}," in local


def test_training_of_two_nodes_in_numbers() -> None:
    config = load(TWO_NODES)
    training = estimated(config).training
    held = shape_of(config).held(config.agents[QWEN].parallel, 0).all
    assert held == pytest.approx(7.6156e9 / 2, rel=1e-3)
    assert training.weights == 2 * held
    assert training.gradients == 4 * held
    assert training.optimizer == pytest.approx(12 * held / 4, abs=2)
    # A layer's input for each of 28 layers, one layer computed again, its gradients, two gathered inputs.
    # A layer: 4 h / 2 of norms; (2 h + 2 x 512 + 4 x 18,944) / 2 of attention and feed-forward.
    layer = (4 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18_944) / 2
    assert training.activations == 2 * 16_384 * (28 * 3584 / 2 + 2 * layer + 2 * 3584)
    assert 1 * GB < training.log_probs < 4 * GB
    assert training.host > 2 * training.weights  # the reference of the KL penalty


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("optimizer.distributed=false", "set optimizer.distributed: true"),
        ("agents.qwen-7b.recompute=none", "set agents.qwen-7b.recompute: full"),
        ("agents.qwen-7b.recompute=selective", "set agents.qwen-7b.recompute: full"),
    ],
)
def test_two_nodes_without_what_saves_memory_do_not_fit(setting: str, fix: str) -> None:
    first = judged(load(TWO_NODES, [setting]))[0]
    assert (first.level, first.subject) == ("warning", f"agents.{QWEN} memory, training")
    assert "too much; " in first.text
    assert fix in first.text


def test_fewer_tokens_need_less() -> None:
    settings = ["agents.qwen-7b.recompute=none", "batch.microbatch_tokens=5120"]
    assert judged(load(TWO_NODES, settings))[0].level == "ok"


def test_offloading_moves_the_optimizer_to_the_host() -> None:
    kept = estimated(load(TWO_NODES, [f"agents.{QWEN}.placement.offload=none"])).training
    moved = estimated(
        load(TWO_NODES, ["optimizer.cpu_offload=true", f"agents.{QWEN}.placement.offload=none"])
    ).training
    assert moved.optimizer == 0
    assert moved.host - kept.host == pytest.approx(kept.optimizer, rel=1e-6)


def test_without_a_kl_penalty_no_reference_is_in_host_memory() -> None:
    kept = estimated(load(TWO_NODES)).training
    without_kl = estimated(load(TWO_NODES, ["algorithm.kl_coef=0"])).training
    assert kept.host - without_kl.host == 2 * kept.weights
    assert kept.total == without_kl.total


def test_a_share_for_the_checkpoint_is_in_host_memory() -> None:
    """Copies of what trains on meanwhile; divided states are copied in any case."""
    config = load(TWO_NODES)
    processes = config.agents[QWEN].parallel.data
    kept = estimated(config).training
    at_once = estimated(load(TWO_NODES, ["checkpoint.asynchronous=false"])).training
    never = estimated(load(TWO_NODES, ["checkpoint.every=0"])).training
    assert processes > 1
    assert kept.host - at_once.host == pytest.approx(kept.weights / processes, abs=1)
    assert at_once.host - never.host == kept.optimizer


def test_states_of_experts_are_divided_over_those_who_hold_the_same() -> None:
    model = f"agents.{QWEN}.model=models/Qwen3-30B-A3B"
    config = load(TWO_NODES, [model, f"agents.{QWEN}.parallel={{tensor: 2, data: 4, expert: 2}}"])
    held = shape_of(config).held(config.agents[QWEN].parallel, 0)
    training = estimated(config).training
    assert training.optimizer == pytest.approx(12 * (held.dense / 4 + held.expert / 4), abs=2)
    config = load(TWO_NODES, [model, f"agents.{QWEN}.parallel={{tensor: 2, data: 4, expert: 8}}"])
    held = shape_of(config).held(config.agents[QWEN].parallel, 0)
    training = estimated(config).training
    assert training.optimizer == pytest.approx(12 * (held.dense / 4 + held.expert), abs=2)


def test_sequence_parallelism_divides_what_is_between_matrices() -> None:
    parts = estimated(load(TWO_NODES)).training.activations
    whole = estimated(load(TWO_NODES, [f"agents.{QWEN}.parallel.sequence=false"])).training.activations
    assert whole - parts == 2 * 16_384 * (28 * 3584 / 2 + 2 * 4 * 3584 / 2)


def test_float32_has_no_second_copy_of_the_weights() -> None:
    training = estimated(load(TWO_NODES, [f"agents.{QWEN}.dtype=float32"])).training
    assert training.optimizer == pytest.approx(8 / 4 * training.weights / 4, rel=1e-6)


def test_the_first_stage_keeps_more_micro_batches() -> None:
    config = load(FOUR_NODES, ["agents.qwen-7b.recompute=none"])
    pipelined = estimated(config).training.activations
    flat = estimated(load(TWO_NODES, ["agents.qwen-7b.recompute=none"])).training.activations
    assert pipelined == pytest.approx(flat, rel=0.01)  # two micro-batches of half the layers


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_what_a_colocated_trainer_leaves(offload: str) -> None:
    found = estimated(load(TWO_NODES, [f"agents.{QWEN}.placement.offload={offload}"]))
    assert found.generation is not None
    states = {"none": found.training.states, "optimizer": found.training.weights, "all": 0}[offload]
    left = found.generation.trainer - found.training.other
    assert left == states + (
        found.training.activations + found.training.log_probs if offload == "none" else 0
    )


def test_a_trainer_that_stays_leaves_no_room_for_a_large_cache() -> None:
    settings = [f"agents.{QWEN}.placement.offload=none", "rollout.sglang.memory_fraction=0.9"]
    last = judged(load(TWO_NODES, settings))[-1]
    assert last.level == "warning"
    assert "too much; " in last.text
    assert f"set agents.{QWEN}.placement.offload: all" in last.text


def test_only_what_no_uncertainty_excuses_is_an_error() -> None:
    found = estimated(load(TWO_NODES))
    levels = {}
    for percent in (90, 97, 105, 115, 130):
        room = round(found.training.total * 100 / percent)
        estimate = MemoryEstimate(room, found.training, None, None)
        levels[percent] = next(iter(memory.findings(load(TWO_NODES), QWEN, estimate))).level
    assert list(levels.values()) == ["ok", "warning", "warning", "warning", "error"]


def test_the_cache_of_servers_apart_in_numbers() -> None:
    config = load(TWO_NODES, [f"agents.{QWEN}.placement={{}}", "rollout.sglang.memory_fraction=0.5"])
    found = estimated(config)
    assert found.sending is None
    assert found.generation is not None
    assert found.generation.trainer == 0
    assert found.generation.weights == 2 * PARAMETERS["Qwen2.5-7B-Instruct"]
    assert found.generation.cache == 40 * GB - found.generation.weights
    per_token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads, channels, bytes
    assert found.generation.tokens == int(found.generation.cache / per_token)
    assert found.generation.wanted == 128 * (512 + 1024)  # of 1,024 responses on eight servers


@pytest.mark.parametrize("offload", ["none", "all"])
def test_the_cache_of_colocated_servers_is_of_what_the_trainer_leaves_at_the_start(offload: str) -> None:
    settings = [f"agents.{QWEN}.placement.offload={offload}", "rollout.sglang.memory_fraction=0.5"]
    found = estimated(load(TWO_NODES, settings))
    assert found.generation is not None
    training = found.training
    states = training.gradients + training.optimizer / 3 if offload == "none" else 0
    at_start = training.weights + states + 4 * GB
    cache = (80 * GB - at_start) / 2 - 2 * PARAMETERS["Qwen2.5-7B-Instruct"]
    assert found.generation.cache == pytest.approx(cache, abs=2)


@pytest.mark.parametrize(
    ("tokens", "level", "words"),
    [(4096, "error", "not one fits"), (20_000, "warning", "wait for each other"), (150_000, "ok", "")],
)
def test_a_cache_that_is_small(tokens: int, level: str, words: str) -> None:
    last = judged(load(TWO_NODES, [f"rollout.sglang.cache_tokens={tokens}"]))[-1]
    assert (last.level, last.subject) == (level, f"agents.{QWEN} memory, generation")
    assert words in last.text
    assert f"holds {tokens:,} tokens" in last.text
    assert level == "ok" or f"raise agents.{QWEN}.rollout.sglang.cache_tokens" in last.text


def test_weights_that_are_sent_lie_beside_the_trainer() -> None:
    kept = estimated(load(TWO_NODES))
    assert kept.generation is not None
    weights = kept.training.weights + kept.generation.weights
    assert kept.sending == weights + kept.training.other + kept.generation.other
    config = load(TWO_NODES, [f"agents.{QWEN}.placement.offload=none"])
    found = estimated(config)
    assert found.generation is not None
    assert found.sending == found.training.total + found.generation.weights
    room = round(1.1 * found.training.total)
    small = MemoryEstimate(room, found.training, found.generation, found.sending)
    subjects = {f.subject: f for f in memory.findings(config, QWEN, small)}
    sending = subjects[f"agents.{QWEN} memory, sending weights"]
    assert sending.level == "warning"
    assert "too much; " in sending.text
    assert f"raise agents.{QWEN}.rollout.sglang.tensor" in sending.text


def test_a_local_engine_is_a_second_model_beside_the_trainer() -> None:
    config = load(TWO_NODES, ["rollout.engine=local", f"agents.{QWEN}.placement={{}}"])
    found = estimated(config)
    assert found.training.rollout == 2 * PARAMETERS["Qwen2.5-7B-Instruct"]
    last = judged(config)[-1]
    assert last.level == "error"
    assert f"set agents.{QWEN}.rollout.engine: sglang" in last.text


def test_unknown_gpus_give_sums_without_a_judgement() -> None:
    config = load(TWO_NODES, ["optimizer.distributed=false"])
    findings = list(memory.findings(config, QWEN, estimated(config, gpu=None)))
    assert {finding.level for finding in findings} == {"ok"}
    assert "of a GPU" in findings[0].text
