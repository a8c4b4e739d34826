#!/bin/sh
# Node launcher for pods that are running already. FOLDER is new for each job; all its pods share it, and nobody else may
# write it.
#   on_every_pod.sh FOLDER              on the other pods: run each command that is given to the first pod
#   on_every_pod.sh FOLDER COMMAND...   on the first pod: run COMMAND here and on the other pods
set -eu
folder=$1
shift
mkdir -p "$folder"
chmod 700 "$folder"

if [ $# -gt 0 ]; then
    call=$(date +%s%N) # names of later calls are larger
    printf '%s\n' "$@" > "$folder/.$call"
    mv "$folder/.$call" "$folder/$call"
    exec "$@"
fi

last=0
while :; do
    # The shell opens the folder anew each time, without which a client of NFS would not see new files for a while.
    for call in "$folder"/*; do
        number=${call##*/}
        if [ -e "$call" ] && [ "$number" -gt "$last" ]; then
            last=$number
            xargs --delimiter='\n' --arg-file="$call" env || echo "ended with exit code $?" >&2
        fi
    done
    sleep 1
done
