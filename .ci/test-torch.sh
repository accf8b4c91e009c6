#!/bin/sh
# Runs pytest on several releases of torch, each in an environment of its own below .venv-torch:
#
#     .ci/test-torch.sh MEGATRON_CORE_VERSION "TORCH_VERSION ..." PYTEST_ARGUMENT...
#
# A release that can't be had is an error to whoever asks for it. CI leaves it out and says so: what
# an index has at that moment says nothing of this code, most of which is tested on .venv's torch.
# The other environments may fail CI that way, as nothing at all is tested without them.
set -eu

mcore=$1 versions=$2
shift 2
say() { printf 'megapg: %s\n' "$*" >&2; }

failed=0
for version in $versions; do
    venv=.venv-torch/$version
    if ! TORCH=torch==$version ALLOW_CUDA_TORCH=1 sh .ci/venv.sh "$venv" "$mcore" 3.11 newer; then
        say "LEFT OUT: torch $version could not be installed (see above); nothing was tested on it."
        [ "${CI:-}" = true ] || failed=1
        continue
    fi
    say "on torch $version:"
    OMP_NUM_THREADS=1 "$venv/bin/python" "$@" || failed=1
done
exit "$failed"
