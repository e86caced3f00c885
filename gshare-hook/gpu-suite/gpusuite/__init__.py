"""Rows, runs and judgements of the GPU suite; `suite.py` is the command."""
