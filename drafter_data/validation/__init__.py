"""Validation of a finished store, with or without the dataset that it serves. Never rewrites anything."""

from drafter_data.validation.store import validate_store

__all__ = ["validate_store"]
