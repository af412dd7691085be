#!/usr/bin/env bash
#SBATCH --job-name=mnist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
# A Slurm job for several machines: it starts the launchers of the folder where it is submitted. Not
# tried on a Slurm cluster, only with stand-ins for srun and scontrol. In mnist_ddp:
#     sbatch ../several_machines/slurm_job.sh DATA_PATH [RANKS_PER_MACHINE [LAUNCHER [-- OPTIONS]]]
# RANKS_PER_MACHINE is the number of cards of a machine (8), OPTIONS are those of the script.
# LAUNCHER is msrun, started on each machine by srun without Open MPI and ssh, or mpirun, which gets
# a hostfile of the machines that Slurm gave, and needs ssh between them.
set -euo pipefail
data_path="${1:-}" per_machine="${2:-8}" launcher="${3:-msrun}"
shift "$(($# < 3 ? $# : 3))"
refuse() { echo "slurm_job.sh: $1" >&2; exit 2; }
[[ -n "$data_path" ]] || refuse "give DATA_PATH, the folder of the data, the same on all machines"
[[ "$per_machine" =~ ^[1-9][0-9]{0,3}$ ]] || refuse "RANKS_PER_MACHINE '$per_machine' is no number"
[[ "$launcher" =~ ^(msrun|mpirun)$ ]] || refuse "the launcher is '$launcher'; write msrun or mpirun"
id="${SLURM_JOB_ID:-} ${SLURM_JOB_NUM_NODES:-} ${SLURM_JOB_NODELIST:-}" # they go into arithmetic
[[ "$id" =~ ^[1-9][0-9]*\ [1-9][0-9]*\ .+ && -f "${SLURM_SUBMIT_DIR:-}/run_msrun.sh" ]] ||
    refuse "no job of Slurm, or one of another folder; in mnist_ddp, start it with sbatch"
cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this file, elsewhere
type srun scontrol >/dev/null 2>&1 || refuse "there is no srun or no scontrol on the PATH"
machines="$(scontrol show hostnames "$SLURM_JOB_NODELIST")" # one a line
ranks=$((per_machine * SLURM_JOB_NUM_NODES))
if [[ "$launcher" == mpirun ]]; then
    awk -v n="$per_machine" '{ print $1 " slots=" n }' <<<"$machines" >"hostfile.$SLURM_JOB_ID"
    export OMPI_MCA_plm=rsh OMPI_MCA_ras=^slurm # the machines of the file, by ssh, not by Slurm
    exec bash run_mpirun_2.sh "hostfile.$SLURM_JOB_ID" "$data_path" "$ranks" "$@"
fi
# The port depends on the job, so that two jobs on a machine do not meet.
# shellcheck disable=SC2016  # SLURM_NODEID, 0 on the first machine, is known where srun starts it
exec srun bash -c 'exec bash run_msrun.sh "$1" "$2" --node-rank "$SLURM_NODEID" "${@:3}"' job \
    "$data_path" "$ranks" --nodes "$SLURM_JOB_NUM_NODES" --master-addr "${machines%%$'\n'*}" \
    --master-port $((20000 + SLURM_JOB_ID % 10000)) "$@"
