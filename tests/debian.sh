#!/usr/bin/env bash
# Installs the Debian packages of the programs that are named, where they are missing and root may: tests/debian.sh [PROGRAM...]
# Without arguments, those of all tests: network namespaces and iptables (hosts that lose each other), a real Slurm, sshd and two
# MPI launchers (where jobs are started), systemd (which checks its unit), Chromium (looks at the page), Prometheus (reads the
# metrics), zsh, fish and tcsh (complete commands), and clang's libFuzzer for the store in C, which Debian
# only recommends with clang. Where one of these cannot be had, the tests say that they did not run.
set -euo pipefail
declare -A packages=([ip]=iproute2 [slurmctld]=slurm-wlm [munged]=munge [clang]="clang --install-recommends")
packages+=([chromium]=chromium [promtool]=prometheus [ssh]=openssh-client [sshd]=openssh-server [iptables]=iptables)
packages+=([zsh]=zsh [fish]=fish [tcsh]=tcsh)
packages+=([mpirun.openmpi]=openmpi-bin [mpiexec.hydra]=mpich [systemd-analyze]=systemd)
[ $# -gt 0 ] || set -- "${!packages[@]}"
for program in "$@"; do
    read -ra package <<<"${packages[$program]}"
    if [ "$(id -u)" = 0 ] && ! PATH=$PATH:/usr/sbin command -v "$program" >/dev/null && command -v apt-get >/dev/null; then
        [ -n "${fetched:-}" ] || apt-get update -qq >/dev/null 2>&1 || true
        fetched=yes
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${package[@]}" >/dev/null 2>&1 ||
            echo "$0: ${package[0]} could not be installed; the tests that need it will not run" >&2
    fi
done
