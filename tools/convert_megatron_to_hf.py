"""A Megatron checkpoint as a Hugging Face folder: `hacpo convert to-hf`, as a script."""

from functools import partial

import typer

from megatron_hacpo.cli import main
from megatron_hacpo.convert import to_hf

if __name__ == "__main__":
    main(partial(typer.run, to_hf))
