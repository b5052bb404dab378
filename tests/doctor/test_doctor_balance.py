"""Predicted steps, and the division of devices with which fewest wait."""

import pytest
from doctor_inputs import H100, LLAMA, QWEN, TWO_NODES, estimated, shape_of

from megatron_hacpo.config import RunConfig, dump, load, resolve
from megatron_hacpo.config.yaml12 import parse
from megatron_hacpo.doctor import balance
from megatron_hacpo.doctor.balance import DEVICES, UNKNOWN, Machine, better_split, device_of, predict
from megatron_hacpo.doctor.finding import Finding
from megatron_hacpo.doctor.memory import GB
from megatron_hacpo.doctor.shape import Shape, read_shapes
from megatron_hacpo.launch.placement import Node, place

ON_H100 = Machine(device_of(H100.name), H100.total)
NODES = [Node("a", 8), Node("b", 8)]
BOTH = {QWEN: ON_H100, LLAMA: ON_H100}

pytestmark = pytest.mark.usefixtures("models")


def test_gpus_by_name() -> None:
    assert [device_of(f"NVIDIA {d.name} 80GB").name for d in DEVICES] == ["A100", "H100", "H200", "B200"]
    assert device_of("Quadro") is UNKNOWN


def test_training_is_the_stated_number_of_passes() -> None:
    def step(*settings: str) -> balance.Step:
        config = load(TWO_NODES, settings)
        return predict(config, QWEN, shape_of(config), ON_H100)

    usual = step()
    # 2 N FLOPs a token and pass: old and reference log-probs of own responses, then everybody's, forward,
    # backward twice that, and once more by recomputation.
    tokens = 128 * 8 * (512 + 2048)
    one = 2 * 7.07e9 * tokens / (0.35 * 989e12 * 8)  # without the embedding, whose rows are looked up
    assert usual.log_probs == pytest.approx(2 * one, rel=0.05)
    assert usual.training == pytest.approx(2 * 4 * one, rel=0.05)
    assert step("agents.qwen-7b.recompute=none").training == pytest.approx(usual.training * 3 / 4)
    assert step("algorithm.kl_coef=0").log_probs == pytest.approx(usual.log_probs / 2)
    assert step("algorithm.name=gspo").training == pytest.approx(usual.training / 2)
    assert step("agents.qwen-7b.parallel.data=8").training == pytest.approx(usual.training / 2)
    assert step("agents.qwen-7b.parallel={tensor: 2, data: 4, pipeline: 2}").training > usual.training / 2


def test_generation_is_bound_by_bandwidth_and_by_the_cache() -> None:
    def seconds(*settings: str, bandwidth: float = 3.35e12) -> float:
        config = load(TWO_NODES, [f"agents.{QWEN}.placement={{}}", *settings])
        device = balance.Device("X", ON_H100.device.flops, bandwidth)
        return predict(config, QWEN, shape_of(config), Machine(device, 80 * GB)).generation

    usual = seconds()
    # 128 responses at once: weights for 4,096 tokens of the longest, caches for 2,048 tokens of each.
    read = 4096 * 2 * 7.6156e9 + 128 * 2048 * 1536 * 57_344
    assert usual == pytest.approx(read / (0.7 * 3.35e12), rel=0.02)
    assert seconds(bandwidth=2 * 3.35e12) == pytest.approx(usual / 2, rel=0.02)
    assert seconds("rollout.sglang.cache_tokens=20000") > 2 * usual
    assert seconds("rollout.sglang.cache_tokens=60000") > usual  # less at once takes never less time
    assert seconds("rollout.sglang.servers=2") > usual


def unequal(*settings: str) -> RunConfig:
    """A small and a large agent with as many GPUs each."""
    small = [f"agents.{QWEN}.model=models/Llama-3.2-1B-Instruct", f"agents.{QWEN}.parallel={{data: 8}}"]
    return load(TWO_NODES, [*small, *settings])


def crowded_together() -> RunConfig:
    """The same, on half of the devices for the large one."""
    sizes = f"agents.{LLAMA}.parallel={{tensor: 1, pipeline: 2, data: 2}}"
    return unequal(sizes, f"agents.{LLAMA}.rollout.sglang.servers=4")


def apply(config: RunConfig, settings: list[str]) -> RunConfig:
    return resolve(parse(dump(config)), settings)


def shapes(config: RunConfig) -> dict[str, Shape]:
    return {name: shape for name, shape in read_shapes(config).items() if isinstance(shape, Shape)}


def longest(config: RunConfig, machine: Machine = ON_H100) -> float:
    return max(predict(config, name, shape, machine).total for name, shape in shapes(config).items())


def test_a_better_split_is_better_and_fits() -> None:
    config = crowded_together()
    split = better_split(config, shapes(config), BOTH, NODES)
    assert split is not None
    changed = apply(config, split.settings)
    assert changed == split.config
    place(changed, NODES)
    assert longest(changed) == pytest.approx(split.seconds)
    assert longest(changed) < 0.95 * longest(config)
    for name in (QWEN, LLAMA):
        assert estimated(changed, name).highest <= 80 * GB


def test_servers_move_between_agents() -> None:
    apart = [f"agents.{name}.placement={{}}" for name in (QWEN, LLAMA)]
    sizes = [f"agents.{QWEN}.parallel={{data: 2}}", f"agents.{LLAMA}.parallel={{tensor: 4, data: 1}}"]
    servers = [f"agents.{QWEN}.rollout.sglang.servers=6", f"agents.{LLAMA}.rollout.sglang.servers=1"]
    config = unequal(*apart, *sizes, *servers)
    split = better_split(config, shapes(config), BOTH, NODES)
    assert split is not None
    assert split.config.agents[LLAMA].rollout.sglang.servers > 1
    used = sum(
        agent.parallel.world_size + agent.rollout.sglang.servers for agent in split.config.agents.values()
    )
    assert used <= 16
    assert longest(apply(config, split.settings)) == pytest.approx(split.seconds)


def test_no_split_is_offered_that_memory_does_not_hold() -> None:
    """Fewer copies divide the optimizer's states less."""
    config, nodes = unequal(), [Node("a", 16)]
    free = better_split(config, shapes(config), BOTH, nodes)
    assert free is not None
    assert free.config.agents[QWEN].parallel.data < 8
    full = Machine(ON_H100.device, estimated(config).sending)
    assert better_split(config, shapes(config), {**BOTH, QWEN: full}, nodes) is None


def test_experts_stay_divisible() -> None:
    model = f"agents.{LLAMA}.model=models/Qwen3-30B-A3B"
    config = unequal(model, f"agents.{LLAMA}.parallel={{tensor: 1, data: 4, expert: 4}}")
    config = apply(config, [f"agents.{LLAMA}.rollout.sglang.servers=4"])
    unlimited = dict.fromkeys(BOTH, Machine(ON_H100.device))
    split = better_split(config, shapes(config), unlimited, [Node("a", 16)])
    assert split is not None
    assert split.config.agents[LLAMA].parallel.data in (8, 12)


def test_equal_agents_have_no_better_split() -> None:
    config = load(TWO_NODES, [f"agents.{QWEN}.model=models/Llama-3.1-8B-Instruct"])
    assert better_split(config, shapes(config), BOTH, NODES) is None


def steps(config: RunConfig, nodes: list[Node] | None = NODES) -> list[Finding]:
    return list(balance.findings(config, shapes(config), BOTH, nodes))


def test_one_who_waits_is_warned_with_a_split() -> None:
    config = crowded_together()
    small, large = steps(config)
    assert (small.level, large.level) == ("warning", "ok")
    assert f"of the step for {LLAMA}; a step of " in small.text
    given = small.text.partition(" by --set ")[2].split(" --set ")
    assert longest(apply(config, given)) < longest(config)


def test_without_a_better_split_more_devices_are_asked_for() -> None:
    config = unequal()
    small, _ = steps(config, [Node("a", 8, component=0), Node("b", 8, component=1)])
    assert small.level == "warning"
    assert f"give {LLAMA} more devices" in small.text


@pytest.mark.parametrize("setting", ["algorithm.name=gspo", f"agents.{LLAMA}=null"])
def test_nobody_waits_where_nothing_is_shared(setting: str) -> None:
    config = unequal(setting)
    assert [finding.level for finding in steps(config)] == ["ok"] * len(config.agents)


def test_nobody_is_told_to_move_processes_between_cores() -> None:
    assert [finding.level for finding in steps(unequal(), None)] == ["ok", "ok"]


def test_unknown_gpus_give_shares_in_place_of_seconds() -> None:
    config = unequal()
    _, large = balance.findings(config, shapes(config), dict.fromkeys(BOTH, Machine()), None)
    assert large.text.startswith("1.00 of the longest agent's (")
