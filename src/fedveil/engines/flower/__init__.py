"""The engine that reaches clients through Flower: what goes over the wire, and who is at its other end."""
