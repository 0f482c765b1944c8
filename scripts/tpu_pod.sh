#!/bin/bash
# A learner on every host of a TPU VM slice, from a machine with gcloud:
#
#     scripts/tpu_pod.sh [--dry-run] [--actors-elsewhere] TPU ZONE NAME CONFIG [override ...]    start, or go on with, a run
#     scripts/tpu_pod.sh [--dry-run] --stop TPU ZONE NAME                                        stop it; it saves itself
#
# Each host needs ~/tianji, with tianji_jax in ~/tianji/.venv, the configuration, and the learner's keys in ~/tianji/keys
# (`tianji keys new keys`, once), for example
#
#     gcloud compute tpus tpu-vm scp --zone=ZONE --worker=all --recurse agents configs keys pyproject.toml README.md \
#         LICENSE tianji_jax TPU:tianji/
#     gcloud compute tpus tpu-vm ssh TPU --zone=ZONE --worker=all --command='cd tianji && chmod -R go= keys &&
#         python3.11 -m venv .venv && .venv/bin/pip install ".[tpu]"'
#
# Settings are those of each host: learner.trajectories_per_update=4 on four hosts makes batches of 16. Actors run on the
# same hosts (actors.count), or with --actors-elsewhere on others only; their commands are printed.
#
# Learners go on without this terminal. Their logs are ~/tianji/runs/NAME.log; the run is ~/tianji/runs/NAME of worker 0,
# whose disk is lost with a TPU that is deleted: mount another at ~/tianji/runs of a TPU that can be preempted. The same
# command goes on with a run that was saved. --dry-run prints what would be run here.

set -eu
usage() {
    sed -n '2,5p' "$0" | cut -c3- >&2
    exit 2
}

dry_run=false elsewhere=false stop=false
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=true ;;
        --actors-elsewhere) elsewhere=true ;;
        --stop) stop=true ;;
        -*) usage ;;
        *) break ;;
    esac
    shift
done
[ $# -ge 3 ] || usage
tpu=$1 zone=$2 name=$3
shift 3
[[ $name =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] || usage

# Run gcloud's command for TPU VMs, or print it.
tpu_vm() {
    local gcloud=(gcloud compute tpus tpu-vm "$1" "$tpu" "--zone=$zone" "${@:2}")
    if $dry_run; then
        printf '%q ' "${gcloud[@]}"
        printf '\n'
    else
        "${gcloud[@]}" </dev/null
    fi
}

if $stop; then
    # Learners vote: one that is told to stop stops all, after the same update.
    tpu_vm ssh --worker=0 --command="kill -TERM \$(cat tianji/runs/$name.pid)"
    exit
fi

[ $# -ge 1 ] || usage
learner=(tianji learner "$@" run.directory=runs "run.name=$name" security.keys=keys)
if $elsewhere; then
    learner+=(actors.count=0 actors.listen=tcp://0.0.0.0:5555)
fi

# Only worker 0 has what was saved, and all have to know. Checkpoints are numbered; the folder alone, or a save that was
# cut off, is nothing to go on from: a run that ended before it was first saved begins anew.
saved=$(tpu_vm ssh --worker=0 --command="cd tianji/runs 2>/dev/null || exit 0
if test -f $name.pid && kill -0 \$(cat $name.pid) 2>/dev/null; then echo $name runs already >&2; exit 1; fi
if find $name/checkpoints -maxdepth 1 -name '[0-9]*' ! -name '*[!0-9]*' 2>/dev/null | grep -q .; then echo SAVED
elif test -d $name; then mv $name $name-without-checkpoint-\$(date +%s); fi")
if $dry_run; then
    printf '%s\n' "$saved" "# if that says SAVED, with --resume runs/$name:"
elif [[ $saved == *SAVED* ]]; then
    learner+=(--resume "runs/$name")
fi

# JAX finds rank, size and coordinator in the slice's metadata.
command=$(printf '%q ' "${learner[@]}")
tpu_vm ssh --worker=all --command="cd tianji && mkdir -p runs && export PATH=\$PWD/.venv/bin:\$PATH &&
(nohup setsid bash -c 'echo \$\$ > runs/$name.pid; exec \"\$@\"' - $command >> runs/$name.log 2>&1 < /dev/null &)"

if $elsewhere; then
    hosts=$(tpu_vm describe '--format=value(networkEndpoints[].ipAddress)')
    $dry_run && printf '%s\n' "$hosts" && hosts=EACH_HOST
    echo "# Actors, from hosts of the same network, some for every learner:"
    for host in ${hosts//;/ }; do
        printf '%q ' tianji actor "$@" --connect "tcp://$host:5555" --count 4 security.keys=keys
        printf '\n'
    done
fi
