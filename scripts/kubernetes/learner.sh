#!/bin/bash
# A learner in a pod of a JobSet: starts the run, or goes on with it if it was saved before.
#
#     learner.sh RUN_FOLDER CONFIG [override ...]
#
# All learners see RUN_FOLDER. Nothing in it changes between their looking and the start of the run, because that waits
# until all of them are there.

set -eu
run=$1
shift
start=("$@" "run.directory=$(dirname "$run")" "run.name=$(basename "$run")")
# Checkpoints are numbered; the folder alone, or a save that was cut off, is nothing to go on from.
if find "$run/checkpoints" -maxdepth 1 -name '[0-9]*' ! -name '*[!0-9]*' 2>/dev/null | grep -q .; then
    start+=(--resume "$run")
elif [ -d "$run" ] && [ "$JOB_COMPLETION_INDEX" -eq 0 ]; then
    # A run that ended before it was first saved begins anew.
    mv "$run" "$run-without-checkpoint-$(date +%s)"
fi
# JAX finds rank, size and coordinator. In place of the shell, so that it gets SIGTERM.
exec tianji learner "${start[@]}"
