"""Hugging Face model folders: which families are supported, and reading and writing them in small memory."""
