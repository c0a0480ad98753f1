#!/bin/sh
# Installs what the build needs where it is missing, or says in one line what to install.
# Needed: Go (1.21 or later fetches the right toolchain itself), a C compiler, the HDF5 library with its headers.
#   scripts/deps.sh tests    also programs that some tests run against (h5dump, h5py, mpirun, ip), where root has apt-get:
#                            without them these tests are skipped
set -eu

say() { echo "moetor: $*" >&2; }

command -v go >/dev/null 2>&1 || { say "Go is missing: install Go 1.26 (see https://go.dev/doc/install), then run make again"; exit 1; }

works() { # can a C program that uses HDF5 be compiled and linked?
	command -v cc >/dev/null 2>&1 || return 1
	tmp=$(mktemp -d)
	printf '#include <hdf5.h>\nint main(void){return H5open()<0;}\n' >"$tmp/t.c"
	for flags in "-I/usr/include/hdf5/serial -L/usr/lib/$(cc -print-multiarch 2>/dev/null || true)/hdf5/serial" "${CGO_CFLAGS:-} ${CGO_LDFLAGS:-}"; do
		# shellcheck disable=SC2086
		if cc "$tmp/t.c" -o "$tmp/t" $flags -lhdf5 >/dev/null 2>&1; then rm -rf "$tmp"; return 0; fi
	done
	rm -rf "$tmp"
	return 1
}

if [ "${1:-}" = tests ]; then
	"$0"
	missing=
	command -v h5dump >/dev/null 2>&1 || missing="$missing hdf5-tools"
	/usr/bin/python3 -c 'import h5py' >/dev/null 2>&1 || missing="$missing python3-h5py"
	command -v mpirun >/dev/null 2>&1 || missing="$missing openmpi-bin"
	command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
	[ -n "$missing" ] || exit 0
	if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
		say "installing$missing for the tests"
		export DEBIAN_FRONTEND=noninteractive
		# shellcheck disable=SC2086
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null 2>&1 && exit 0
	fi
	say "tests against$missing are skipped"
	exit 0
fi

works && exit 0

case $(uname -s) in
Darwin)
	say "HDF5 is missing: brew install hdf5, then export CGO_CFLAGS=\"-I\$(brew --prefix hdf5)/include\" CGO_LDFLAGS=\"-L\$(brew --prefix hdf5)/lib\""
	exit 1 ;;
esac

packages="gcc libc6-dev libhdf5-dev"
if command -v apt-get >/dev/null 2>&1; then
	if [ "$(id -u)" = 0 ]; then sudo=
	elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then sudo="sudo -n"
	else say "a C compiler or HDF5 is missing: sudo apt-get install -y $packages"; exit 1
	fi
	say "installing $packages"
	export DEBIAN_FRONTEND=noninteractive
	log=$(mktemp)
	if ! { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends $packages; } >"$log" 2>&1; then
		tail -n 5 "$log" >&2
		say "the installation failed: sudo apt-get install -y $packages"
		exit 1
	fi
	rm -f "$log"
	works || { say "HDF5 still does not link after installing $packages"; exit 1; }
	exit 0
fi
say "a C compiler or HDF5 is missing: install gcc and the HDF5 development package of your system"
exit 1
