#!/usr/bin/env bash
# Prints the lines with the cause of a failure, from a log of pip, CMake and compilers.
#
#     scripts/first_errors.sh LOG
#
# The first errors of a compiler, linker or CMake, if there are any: what make and pip
# print after them only repeats that a command failed. Else the last lines that match
# `error` or the like, else the last lines.
set -uo pipefail

compiler=': (fatal )?error: |\bld: .*(cannot|not recognized|undefined)|^ *nvcc fatal'
cmake='^ *CMake Error'
# Keep only the last of pip's retries.
log=$(LC_ALL=C sed '/Retrying (Retry(total=[1-9]/d' "$1" | tr -d '\000')
{
  grep -aE -m 5 "$compiler" <<<"$log" ||
    grep -aE -m 1 -A 4 "$cmake" <<<"$log" | grep -a . ||
    grep -aiE '(error|fatal|killed|no space left)\b' <<<"$log" | tail -n 8 | grep -a . ||
    tail -n 8 <<<"$log"
} | sed -E 's/^ +//; s#[^ ]*/build-horovod\.[^/]*/##' | cut -c 1-300
