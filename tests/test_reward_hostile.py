"""No response is evaluated as code: an audit hook sees all that Python compiles and does meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

MARK = "hostilemark"

CODE = [
    f"__import__('os').system('touch {MARK}')",
    f"[__import__('os').system('touch {MARK}')]",
    f"().__class__.__base__.__subclasses__()[0]('{MARK}')",
    f"open('{MARK}','w')",
    f"(lambda: {MARK})()",
    f"{MARK}(1)",
    f"exec({MARK})",
    f"S('{MARK}')",
    f"1 if {MARK}() else 2",
    f"1+{MARK}",
    f"{MARK}!",
    f"x.{MARK}",
    f"[{MARK} for x in (1,)]",
    f"f'{{{MARK}()}}'",
]
SHAPES = [
    "%s",
    r"\text{%s}",
    r"\mathrm{%s} + 1",
    r"\variable{%s}",
    r"\operatorname{%s}(3)",
    r"x_{%s}",
    r"f(%s)",
    r"\frac{1}{%s}",
    r"\frac{d}{d %s} x^2",
    r"\sqrt{%s}",
    r"\{%s, 2\}",
    r"x = %s",
    r"\begin{pmatrix} %s & 1 \end{pmatrix}",
    r"\sum_{n=1}^{\infty} \frac{1}{(n + %s)^2}",
    r"\int_0^1 %s \,dx",
    r"\left. x^2 \right|_{x=%s}",
]
INFINITE_SUM = r"\sum_{n=1}^{\infty} \frac{1}{(n + 7)^2}"
TRUTHS = {
    "math": [r"\sqrt{7}", r"\{1, 2\}"],
    "math_number": ["5"],
    "boxed": ["5"],
    "choice": ["B"],
    "match": ["yes"],
    "exact": ["5"],
}
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "shutil",
)


def unguarded(text: str, answer: str) -> float:
    """math-verify as it is."""
    from math_verify import parse, verify

    truth, parsed = (parse(part, parsing_timeout=None) for part in (f"${answer}$", text))
    return float(verify(truth, parsed, timeout_seconds=None))


def hostile_boxes(verifier: str) -> list[str]:
    """All the code as it is, and for the verifier that reads LaTeX some of it in every shape."""
    boxes = [SHAPES[0] % code for code in CODE]
    if verifier == "math":
        boxes.append(INFINITE_SUM)
        boxes += [
            shape % CODE[(place + 3 * turn) % len(CODE)]
            for place, shape in enumerate(SHAPES[1:])
            for turn in range(3)
        ]
    return boxes


def watched(cases: list[tuple[str, str, list[str]]]) -> list[str]:
    """What happens that should not while boxes are checked, in a process of its own.

    cases: (verifier, truth, boxes).
    """
    from megatron_hacpo.reward import get_verifier

    for verifier, truth, _ in cases:
        get_verifier(verifier).check("", truth)  # load what is loaded late
    seen: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "compile":
            suspect = MARK in str(arguments[0]) or "lambdify" in str(arguments[1])
        elif event == "open":
            suspect = "w" in str(arguments[1])
        else:
            suspect = event.startswith(FORBIDDEN)
        if suspect:
            seen.append(f"{event} {arguments}")

    sys.addaudithook(hook)
    for verifier, truth, boxes in cases:
        for box in boxes:
            get_verifier(verifier).check(rf"So $\boxed{{{box}}}$, <answer>{box}</answer>", truth)
    return seen


def run_watched(cases: list[tuple[str, str, list[str]]], folder: Path) -> list[str]:
    script = (
        "import json, sys; from test_reward_hostile import watched; "
        "sys.stdout.write(json.dumps(watched(json.load(sys.stdin))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(cases),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


def test_no_response_is_evaluated(tmp_path: Path) -> None:
    cases = [(verifier, truth, hostile_boxes(verifier)) for verifier in TRUTHS for truth in TRUTHS[verifier]]
    assert run_watched(cases, tmp_path) == []


def test_the_hook_sees_what_math_verify_compiles_without_our_rules(tmp_path: Path) -> None:
    seen = run_watched([("test_reward_hostile:unguarded", "1.5", [INFINITE_SUM])], tmp_path)
    assert any("lambdify" in event for event in seen)
