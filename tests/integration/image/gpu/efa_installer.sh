#!/bin/bash
# Stands in for AWS's EFA installer, below the folder $ROOT. It accepts the options that AWS documents, and creates the
# documented files. Its test of the EFA card fails, as on an instance whose security group rejects EFA traffic.
#
# Sources, in the EC2 User Guide (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/):
#   efa-start-nccl.html           -y, --mpi, --check-signatures, and the folders of libfabric, aws-ofi-nccl and Open MPI
#   efa-installer-containers.html --skip-kmod, --skip-limit-conf, --no-verify, --enable-ngc
#   efa-start.html                --minimal, "to install the EFA software without Libfabric and Open MPI"
# The installer's README and usage name the other options and the short forms. The packages of aws-ofi-nccl have the
# file 100_ofinccl.conf.
set -eu

fail() {
  echo "$*" >&2
  exit 1
}

long=yes,mpi:,check-signatures,skip-kmod,skip-limit-conf,no-verify,enable-ngc,minimal
options=$(getopt -n efa_installer.sh -o yklnmdug --long "$long,debug-packages,uninstall,enable-gdr" -- "$@") || exit 1
eval set -- "$options"
is_attended=yes has_module=yes is_minimal='' is_verified=yes mpi='openmpi4 openmpi5'
while [ "$1" != -- ]; do
  case $1 in
  -y | --yes) is_attended='' ;;
  -n | --no-verify) is_verified='' ;;
  -k | --skip-kmod) has_module='' ;;
  -m | --minimal) is_minimal=yes ;;
  -u | --uninstall) fail "Error: EFA is not installed, exiting." ;;
  --enable-ngc) is_verified='' has_module='' ;;
  --check-signatures) [ -f "${EFA_INSTALLER_KEY:-}" ] || fail "EFA_INSTALLER_KEY names no key" ;;
  --mpi)
    shift
    [[ $1 =~ ^openmpi[45]$ ]] || fail "Error: unknown MPI $1"
    mpi=$1
    ;;
  esac
  shift
done
[ $# = 1 ] || fail "unknown argument $2"
[ -z "$is_attended" ] || read -rp "Do you wish to continue? " || fail "no answer"

create() {
  for path; do
    mkdir -p "$(dirname "$ROOT$path")"
    printf '#!/bin/sh\necho a stand-in\n' >"$ROOT$path"
    chmod +x "$ROOT$path"
  done
}

create /usr/lib/x86_64-linux-gnu/libibverbs.so.1
[ -z "$has_module" ] || create "/lib/modules/$(uname -r)/updates/dkms/efa.ko"
if [ -n "$is_minimal" ]; then
  echo "Minimal installation does not include libfabric, skipping test."
  exit
fi
create /opt/amazon/efa/bin/fi_info /opt/amazon/efa/lib/libfabric.so.1 /opt/amazon/ofi-nccl/lib/libnccl-net.so
mkdir -p "$ROOT/etc/ld.so.conf.d"
echo /opt/amazon/ofi-nccl/lib >"$ROOT/etc/ld.so.conf.d/100_ofinccl.conf"
for name in $mpi; do
  create "/opt/amazon/${name/openmpi4/openmpi}/bin/mpirun"
done
[ -z "$is_verified" ] || fail "EFA installation is complete and an EFA device has been detected but a ping test failed."
echo "EFA installation complete."
