"""Tasks: one thin Prefect wrapper a stage over a plain function of drafter_data."""
