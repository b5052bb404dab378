"""A Hugging Face folder as a Megatron checkpoint: `hacpo convert to-megatron`, as a script."""

from functools import partial

import typer

from megatron_hacpo.cli import main
from megatron_hacpo.convert import to_megatron

if __name__ == "__main__":
    main(partial(typer.run, to_megatron))
