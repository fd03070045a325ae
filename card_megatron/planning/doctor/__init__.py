"""Is this machine, or this cluster, fit for a run? One file a subject; each gives a list of findings."""
