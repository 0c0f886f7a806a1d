"""Measuring: correctness first, contestants interleaved in one process, every number in a CSV with its machine."""
