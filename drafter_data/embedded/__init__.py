"""The embedded engine: a real HTTP server that speaks the part of the SGLang API that extraction uses, in NumPy."""
