#!/bin/bash
# A cluster as a simulator: one node of fedshot for each GPU. See docs/cluster.md.
#     sbatch cluster.sh CONFIG
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
set -euo pipefail
config=$1 server=$(hostname -f) folder=$PWD/cluster-$SLURM_JOB_ID
umask 077
mkdir "$folder"
trap 'kill $(jobs -p) 2>/dev/null' EXIT

# Certificates of the server, and the clients and the key of each node.
fedshot flower keys --server "$server" --folder "$folder/server"
fedshot flower partition --config "$config" --nodes "$SLURM_NTASKS" --to "$folder/data" |
  tee "$folder/partition.txt"
i=0
while read -r clients; do
  fedshot flower keys --node "$folder/node-$i.key"
  # shellcheck disable=SC2086  # several words
  fedshot flower keys --admit "$folder/node-$i.pub" $clients --folder "$folder/server"
  i=$((i + 1))
done < <(grep -o -- '--clients .*' "$folder/partition.txt")

fedshot flower server --host 0.0.0.0 --folder "$folder/server" > "$folder/server.txt" &
until grep -qs listening "$folder/server.txt"; do kill -0 $!; sleep 1; done

# $0 and $1 are the words after the quoted text.
srun bash -c 'exec fedshot flower node --server "$0:9092" --ca "$1/server/ca.pem" \
  --key "$1/node-$SLURM_PROCID.key" --data "$1/data/node-$SLURM_PROCID" \
  --state "$1/state-$SLURM_PROCID" --device cuda' "$server" "$folder" &

fedshot flower run --config "$config" --folder "$folder/server" --wait 600 --run.fleet vectorised
