"""Trainers behind one seam: the layout they read, the job that runs, the checkpoint that proves it."""
