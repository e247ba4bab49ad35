"""What people look at: pictures (PNG) and text of lengths, progress, chunks, norms and training curves. No Prefect here."""
