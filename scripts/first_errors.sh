#!/usr/bin/env bash
# Prints the lines of a log of pip, CMake and compilers that give the reason of a failure.
#
#     scripts/first_errors.sh LOG
#
# The first errors of a compiler, linker or CMake, where there are any: what make and pip
# print after them only repeats that something failed. Else the last lines that look like
# errors, or the last lines.
set -uo pipefail

compiler=': (fatal )?error: |\bld: .*(cannot|not recognized|undefined)|^ *nvcc fatal'
cmake='^ *CMake Error'
# Of pip's retries the last is enough.
log=$(LC_ALL=C sed '/Retrying (Retry(total=[1-9]/d' "$1" | tr -d '\000')
{
  grep -aE -m 5 "$compiler" <<<"$log" ||
    grep -aE -m 1 -A 4 "$cmake" <<<"$log" | grep -a . ||
    grep -aiE '(error|fatal|killed|no space left)\b' <<<"$log" | tail -n 8 | grep -a . ||
    tail -n 8 <<<"$log"
} | sed -E 's/^ +//; s#[^ ]*/build-horovod\.[^/]*/##' | cut -c 1-300
