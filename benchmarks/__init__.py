"""Benchmarks: each prints both sides of a comparison from one run, as JSON and as a table, and renews its part of results.md."""
