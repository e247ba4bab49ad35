"""Versioned records that pass between stages, hosts and trainers.

Nothing here reads or writes: a record is built by `drafter_data`, stored as JSON or Parquet, and checked when it is read.
"""
