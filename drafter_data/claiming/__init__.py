"""Deciding, with proof, whose a dump is; reading dump folders that others can write to."""
