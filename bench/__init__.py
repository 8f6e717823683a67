"""Benchmarks. Each script in this folder is run by its path; none is installed with the product."""
