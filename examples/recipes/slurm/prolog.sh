#!/bin/sh
# Before a job, as root on each of its nodes: a daemon serves, and the processes of the job get a number for their common share,
# which no other user can read.
set -eu
umask 077
state=${GSHARE_SLURM_STATE:-/run/gshare-slurm}
socket=${GSHARE_SOCKET:-/run/gshare/gshare.sock}
gshare status --socket "$socket" > /dev/null 2>&1 || ${GSHARE_START:-systemctl start gshared}
mkdir -p -m 711 "$state"
tr -d - < /proc/sys/kernel/random/uuid > "$state/$SLURM_JOB_ID"
chown "$SLURM_JOB_UID" "$state/$SLURM_JOB_ID"
