"""Plain logic of drafter-data: no Prefect here. Rooms are named after what they do; see ARCHITECTURE.md."""
