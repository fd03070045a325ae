"""One step, the loop around it, and the state that both work on."""
