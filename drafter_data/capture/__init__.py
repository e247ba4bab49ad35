"""Runs INSIDE the engine: torch, safetensors and the standard library only."""
