"""Benchmarks of single kernels: each checks the result before it times it."""
