"""Everything that touches Megatron-core, which is set up for this machine before any of it is used."""

from megatron_hacpo.megatron import cpu

cpu.install()
