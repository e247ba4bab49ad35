"""Reading generation runs and merging them into a dataset."""
