"""What the client asks of SGLang is what SGLang understands: its own application, without a server."""

import os
import subprocess

import pytest
from sglang_servers import ROOT, sglang_python

pytestmark = pytest.mark.sglang


def test_sglangs_application_understands_every_request() -> None:
    done = subprocess.run(
        [sglang_python(), "tests/sglang_contract.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [line for line in done.stdout.splitlines() if line.endswith(" ok")]
    assert len(passed) == 5
