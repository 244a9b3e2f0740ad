"""The engine that reaches clients through Flower: its messages, and the identities of the nodes."""
