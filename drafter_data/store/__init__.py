"""The store: all states of one model, layer set, norm and dtype."""
