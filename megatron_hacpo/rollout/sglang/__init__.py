"""Rollouts by SGLang servers, which run in a Python environment of their own."""
