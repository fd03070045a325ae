"""Studies: a declared grid of runs, trained, evaluated and reported by one command."""
