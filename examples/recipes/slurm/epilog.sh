#!/bin/sh
# After a job, as root on each of its nodes.
rm -f "${GSHARE_SLURM_STATE:-/run/gshare-slurm}/$SLURM_JOB_ID"
