"""The processes of a run: on one machine, on one node of many, as a Slurm job."""
