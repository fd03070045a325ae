"""Jobs of SLURM: what is asked for, the script that asks for it, where every rank will stand."""
