"""What the doctor says of the examples, on nodes of eight GPUs of 80 GB."""

from pathlib import Path

import pytest
from doctor_inputs import ROOT, node

from megatron_hacpo.config import load
from megatron_hacpo.doctor.judge import judge

pytestmark = pytest.mark.usefixtures("models")

PAPER = ROOT / "examples" / "paper"
WAITS = {"qwen4b_qwen8b": "agents.qwen-4b step", "trio": "agents.qwen-1_7b step"}
"""Who waits for more than a quarter of a step, where eight GPUs cannot be divided better."""


EXAMPLES = sorted(file for file in PAPER.glob("*.yaml") if file.stem != "evaluation")


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_fits_and_nobody_waits_who_need_not(file: Path) -> None:
    name = file.stem
    count = int(name[-6]) if name.endswith("nodes") else 1
    found = judge(load(file), [node(f"node{i}") for i in range(count)])
    wrong = {finding.subject: finding.text for finding in found if finding.level != "ok"}
    assert wrong.keys() == ({WAITS[name]} if name in WAITS else set())
    assert all(
        "no other number of copies and servers on these devices is better" in t for t in wrong.values()
    )
