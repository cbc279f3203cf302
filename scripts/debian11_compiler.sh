#!/usr/bin/env bash
# Puts the C++ compiler and the C library of Debian 11 into a new directory, without root.
#
#     scripts/debian11_compiler.sh DIR
#
# DIR/cc and DIR/c++ run on this machine. What they compile runs with the C library 2.28
# and the C++ library of GCC 8, those of Red Hat 8, or with later ones: Debian 11 has 2.31
# and GCC 10, and DIR/include/older.h replaces the few symbols that are newer.
#
# Needs debootstrap, which downloads the packages and checks their signatures.
set -euo pipefail

directory=${1:?usage: scripts/debian11_compiler.sh DIR}
for program in debootstrap dpkg-deb; do
  command -v "$program" >/dev/null || {
    echo "debian11_compiler: $program is missing: apt-get install debootstrap dpkg" >&2
    exit 1
  }
done
mkdir -p "$(dirname "$directory")"
# Renamed when it is complete.
new=$(mktemp -d "$directory.XXXXXX")
trap 'rm -rf "$new"' EXIT

debootstrap --download-only --force-check-gpg --variant=minbase --include=g++ \
  bullseye "$new/packages"
for package in "$new"/packages/var/cache/apt/archives/*.deb; do
  dpkg-deb --extract "$package" "$new"
done
rm -r "$new/packages" "$new/usr/share"

# Links such as libpthread.so -> /lib/...: the linker would find this machine's library.
find "$new" -type l -lname '/*' -print0 |
  while IFS= read -r -d '' link; do
    ln -sfnr "$new$(readlink "$link")" "$link"
  done

# What the compiler and the linker load, without the C library, which is this machine's.
mkdir "$new/libraries" "$new/include"
for name in bfd ctf gmp isl mpc mpfr opcodes; do
  ln -sr "$new"/usr/lib/*/"lib$name"[.-]*so* "$new/libraries"
done

cat >"$new/include/older.h" <<'END'
/* Included before every file. In the C library since 2.29: these without errno. */
#ifdef __x86_64__
#define OLDER(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5");
#else
#define OLDER(name) __asm__(".symver " #name "," #name "@GLIBC_2.17");
#endif
OLDER(exp) OLDER(exp2) OLDER(log) OLDER(log2) OLDER(pow)
#ifdef __cplusplus
/* Since 2.30: pthread_cond_clockwait. As with GCC 9, waits use the system's clock. */
#include <bits/c++config.h>
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#include <sstream>
/* In the C++ library since GCC 9. Here it is compiled into each library. */
template std::basic_stringstream<char>::basic_stringstream();
#endif
END
for name in cc c++; do
  compiler=gcc
  [[ $name == cc ]] || compiler=g++
  cat >"$new/$name" <<END
#!/bin/sh
here=\${0%/*}
LD_LIBRARY_PATH=\$here/libraries exec "\$here/usr/bin/$compiler" "--sysroot=\$here" \\
  "-B\$here/usr/bin" -include "\$here/include/older.h" "\$@"
END
  chmod +x "$new/$name"
done
echo 'int main() {}' | "$new/c++" -x c++ -o "$new/works" -
mv -T "$new" "$directory"
