"""The extraction loop: requests in flight, claims, commits, progress."""
