"""Writes prompts of the generated task as JSON lines: `tools/write_prompts.py train.jsonl --count 1000`."""

import argparse
from pathlib import Path

from megatron_hacpo.data import rule_task
from megatron_hacpo.data.read import write_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description="Write prompts of the task rule_arithmetic as JSON lines.")
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--count", type=int, default=1024, help="number of prompts (default 1024)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training prompts (default 1)")
    parser.add_argument(
        "--digits", type=int, default=rule_task.DIGITS, help="digits of an operand (default 5)"
    )
    parser.add_argument("--held-out", action="store_true", help="the fixed evaluation prompts instead")
    options = parser.parse_args()
    if options.held_out:
        prompts = rule_task.held_out(options.count, digits=options.digits)
    else:
        prompts = rule_task.batch(options.seed, 0, options.count, digits=options.digits)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(prompts, options.path)


if __name__ == "__main__":
    main()
