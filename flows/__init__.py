"""Flows: composition only. Each reads like the table of contents of its job."""
