"""`hacpo doctor`: whether machines and configuration fit a run, before it costs anything; docs/doctor.md."""
