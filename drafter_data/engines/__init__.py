"""Engines behind one seam: what sends a prefill request and claims its dump."""
