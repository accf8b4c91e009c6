#!/bin/sh
# Runs pytest on several releases of torch, or of Megatron-core, each in an environment of its own
# below .venv-torch or .venv-core, and prints as a table what came of it:
#
#     .ci/test-versions.sh torch|core "VERSION ..." MEGATRON_CORE_VERSION PYTEST_ARGUMENT...
#
# The third argument is for releases of torch; with `core`, torch is what TORCH says. A release that
# can't be had is an error to whoever asks for it. CI leaves it out and says so: what an index has at
# that moment says nothing of this code, most of which is tested on .venv's torch. The other
# environments may fail CI that way, as nothing at all is tested without them.
set -eu

kind=$1 versions=$2 mcore=$3
shift 3
say() { printf 'megapg: %s\n' "$*" >&2; }
count() { sed -n "s/.*<testsuite [^>]*$1=\"\([0-9]*\)\".*/\1/p" "$report"; }

make_environment() {
    case $kind in
        torch) TORCH=torch==$version ALLOW_CUDA_TORCH=1 sh .ci/venv.sh "$venv" "$mcore" 3.11 newer ;;
        core) PYTHON=${PYTHON312:-} ALLOW_CUDA_TORCH=1 sh .ci/venv.sh "$venv" "$version" 3.12 ;;
    esac
}

failed=0 table=
for version in $versions; do
    venv=.venv-$kind/$version
    if ! make_environment; then
        say "LEFT OUT: $kind $version could not be installed (see above); nothing was tested on it."
        [ "${CI:-}" = true ] || failed=1
        continue
    fi
    say "on $kind $version:"
    report=$venv/report.xml
    rm -f "$report"
    OMP_NUM_THREADS=1 "$venv/bin/python" "$@" "--junitxml=$report" || failed=1
    [ -e "$report" ] || continue
    bad=$(($(count failures) + $(count errors))) skipped=$(count skipped)
    passed=$(($(count tests) - bad - skipped))
    table="$table
| $kind $version | $passed | $skipped | $bad |"
done
[ -z "$table" ] || printf '\n| | passed | skipped | failed |\n| :-- | --: | --: | --: |%s\n' "$table"
exit "$failed"
