#!/bin/sh
# Before each task, as the job's user: variables of the task from the job's --gres. A job with neither gets no GPU.
set -eu
state=${GSHARE_SLURM_STATE:-/run/gshare-slurm}
gres=$(scontrol show job "$SLURM_JOB_ID" --oneliner | tr ' ' '\n' | sed -n 's/^TresPerNode=//p; s/^TresPerJob=//p' | tr ',' '\n')
asked() { echo "$gres" | sed -n "s#^gres[:/]$1[:=]\([0-9]*\)\$#\1#p"; }
quota=$(asked gshare)
if [ -z "$quota" ]; then
    echo "export CUDA_VISIBLE_DEVICES="
    exit
fi
echo "export LD_PRELOAD=${GSHARE_HOOK:-/usr/lib/gshare/libgshare_hook.so}"
echo "export GSHARE_SOCKET=${GSHARE_SOCKET:-/run/gshare/gshare.sock}"
echo "export GSHARE_NAME=slurm-$SLURM_JOB_ID"
echo "export GSHARE_RUN=$(cat "$state/$SLURM_JOB_ID")"
echo "export GSHARE_QUOTA=$quota%"
memory=$(asked gshare_mem)
[ -z "$memory" ] || echo "export GSHARE_MEM=${memory}GiB"
