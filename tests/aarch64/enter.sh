#!/usr/bin/env bash
# Runs a command on the emulated machine: enter.sh ROOT QEMU COMMAND...
# Called in new user, mount and PID namespaces (machine.py). Since Linux 6.7 a user namespace has interpreters of
# binaries of its own, so that the machine around it never learns of this one.
set -euo pipefail
root=$1 qemu=$2
shift 2
formats=/proc/sys/fs/binfmt_misc
mount -t binfmt_misc binfmt_misc $formats
# ELF of 64 bits, little-endian, executables of both kinds, for machine 183. P: with the name that it was called by;
# F: qemu is opened here, so it is found from within the other root folder as well.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
echo ":rallypoint:M::$magic:$mask:$qemu:PF" >$formats/register
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/tmp"
path=/env/bin:/usr/bin:/bin:/usr/sbin:/sbin
exec chroot "$root" /usr/bin/env -i HOME=/root PATH=$path LANG=C.UTF-8 RALLYPOINT_TEST_TIMEOUT=900 "$@"
