#!/bin/sh
# Installs what the tests of launchers need: SLURM with munge, and Open MPI, by apt-get as root.
# Quick where they are there already. Where they can't be had it says so and succeeds: the tests
# that need them are skipped.
set -eu

say() { printf 'megapg: %s\n' "$*" >&2; }
lacking() { ! PATH="$PATH:/usr/sbin:/usr/local/sbin" command -v "$1" >/dev/null 2>&1; }

packages=
lacking munged && packages="$packages munge"
{ lacking srun || lacking slurmctld || lacking slurmd; } && packages="$packages slurm-wlm"
lacking mpirun && packages="$packages openmpi-bin"
[ -n "$packages" ] || exit 0

if [ "$(id -u)" != 0 ] || lacking apt-get; then
    say "the tests under SLURM and mpirun are skipped: they need$packages (Debian's names)," \
        "which only root can install, with apt-get."
    exit 0
fi
say "installing$packages for the tests of launchers"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086  # a list of words
{ apt-get -qq update && apt-get -qq install --yes --no-install-recommends $packages; } >/dev/null \
    || say "that failed (see above); the tests under SLURM and mpirun are skipped."
