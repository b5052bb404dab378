"""How good an agent is: benchmarks, what is estimated from their rewards, files and tables."""
