"""Joint checkpoints: all agents at the same step, complete or not there at all."""
