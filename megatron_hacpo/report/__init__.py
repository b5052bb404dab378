"""What a run writes down, and what is made of it afterwards. Imports no torch until something is written."""

from megatron_hacpo.report.curves import draw_curves
from megatron_hacpo.report.meter import Meter
from megatron_hacpo.report.summary import summarise, table, write_summary
from megatron_hacpo.report.writer import MetricsWriter

__all__ = ["Meter", "MetricsWriter", "draw_curves", "summarise", "table", "write_summary"]
