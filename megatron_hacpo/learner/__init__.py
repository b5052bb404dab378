"""One agent as a learner: its own rollouts, the batch it makes of everybody's, and its updates."""
