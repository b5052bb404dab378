"""`python -m megatron_hacpo` is `hacpo`."""

from megatron_hacpo.cli import main

if __name__ == "__main__":
    main()
