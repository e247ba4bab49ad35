"""Scripts that run in a trainer's own environment. A folder of their own: beside ours, `speculators` would be our module."""
